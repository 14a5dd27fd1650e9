"""What may be committed, and when: one ledger per partition, the book of them all, the committer (R2-R6, R11)."""

from __future__ import annotations

from service.ledger.book import Book
from service.ledger.committer import Committer, Evicted, MetadataTooLarge, Offsets
from service.ledger.ledger import Ledger
from service.ledger.metadata import Commit, Key, Snapshot

__all__ = ["Book", "Commit", "Committer", "Evicted", "Key", "Ledger", "MetadataTooLarge", "Offsets", "Snapshot"]

"""The Python client of Headrace: publish prompt jobs, await their results, read their token streams. See
docs/client.md.
"""

from client.client import Client
from client.errors import (
    ClientError,
    Closed,
    DigestMismatch,
    InvalidJob,
    JobCancelled,
    JobEnded,
    JobExpired,
    JobFailed,
    PublishFailed,
    ResultTimeout,
    ResumeExpired,
    StoreError,
    UnknownTopic,
    Unreachable,
)
from client.reader import Reader, Step
from client.result import BlobRef, Chunk, Result, ResultOnly, ResumeToken, Started, Usage, Waiting
from client.signing import Signer
from client.store import StoreAccess
from client.submitted import Submitted
from schemas.security import KafkaSecurity

__all__ = [
    "BlobRef",
    "Chunk",
    "Client",
    "ClientError",
    "Closed",
    "DigestMismatch",
    "InvalidJob",
    "JobCancelled",
    "JobEnded",
    "JobExpired",
    "JobFailed",
    "KafkaSecurity",
    "PublishFailed",
    "Reader",
    "Result",
    "ResultOnly",
    "ResultTimeout",
    "ResumeExpired",
    "ResumeToken",
    "Signer",
    "Started",
    "Step",
    "StoreAccess",
    "StoreError",
    "Submitted",
    "UnknownTopic",
    "Unreachable",
    "Usage",
    "Waiting",
]

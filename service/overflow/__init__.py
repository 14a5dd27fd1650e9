"""The pool's `overflow` topic: where jobs wait that would stand in others' way, or whose home is another partition.

jobs topic ──a tenant fills the partition────▶ overflow, same partition number ──read like any other──▶ admitted
           ├─its tenant's spread has changed──▶ overflow, the number of before ──┤
           └─another pool serves its model────▶ overflow of that pool ───────────┘
"""

from __future__ import annotations

from service.overflow.census import Census
from service.overflow.homes import Homes
from service.overflow.hops import Hops
from service.overflow.spill import Spill

__all__ = ["Census", "Homes", "Hops", "Spill"]

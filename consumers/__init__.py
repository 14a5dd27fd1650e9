"""Kafka records in, calls out: the jobs consumer, its assignor and its rebalance listener. No business rules."""

from __future__ import annotations

from consumers.jobs import JobsConsumer
from consumers.ports import Outlet, Reception

__all__ = ["JobsConsumer", "Outlet", "Reception"]

"""The keys of records, and the partition that a key lies on: what every publisher and reader must do alike. Pure."""

from __future__ import annotations

from aiokafka.partitioner import murmur2


def partition_of(key: str, partitions: int) -> int:
    """Where Kafka's default partitioner (murmur2, as in Java) puts this key."""
    number: int = murmur2(key.encode())
    return (number & 0x7FFFFFFF) % partitions


def job_key(tenant: str, spread: int, order: str) -> str:
    """`tenant`, or `tenant|k` for a tenant spread over several keys; `order` is the conversation or the job id."""
    return tenant if spread <= 1 else f"{tenant}|{partition_of(order, spread)}"


def entry_name(key: bytes | None) -> str:
    """The tenant, model or alias that a record of a registry's topic is about."""
    return (key or b"").decode("utf-8", "replace")


def tenant_of(key: bytes | None) -> str:
    """Whose job a record with this key is, if its publisher keeps to the rule; empty if it cannot be told."""
    return (key or b"").partition(b"|")[0].decode("ascii", "replace")

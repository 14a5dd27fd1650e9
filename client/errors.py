"""What may go wrong for a user of the client, one class each; every message is one line saying what is wrong and what
to do.

ClientError
├── Unreachable        no broker answers (bounded by `connect_timeout_s`)
├── UnknownTopic       a topic or partition does not exist
├── InvalidJob         refused here, before anything was published
├── PublishFailed      not acknowledged in time; publishing the same job again is safe
├── ResultTimeout      no terminal event within the time given to `result()`; the job goes on
├── ResumeExpired      the reply topic no longer holds the job's events
├── Closed             the client was closed, or lost the right to read its replies
├── StoreError         a stored output or input could not be moved
│   └── DigestMismatch what the store returned is not what the worker wrote
└── JobEnded           the job has its terminal event, and it is not `completed`
    ├── JobFailed      `code`, `message`, `retriable`
    ├── JobCancelled
    └── JobExpired     the deadline passed first
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClientError(Exception):
    """Base of everything the client raises by itself."""


class Unreachable(ClientError):
    pass


class UnknownTopic(ClientError):
    pass


class InvalidJob(ClientError, ValueError):
    pass


class PublishFailed(ClientError):
    pass


class ResultTimeout(ClientError, TimeoutError):
    pass


class ResumeExpired(ClientError):
    pass


class Closed(ClientError):
    pass


class StoreError(ClientError):
    pass


class DigestMismatch(StoreError):
    pass


class JobEnded(ClientError):
    """`event` is the terminal event as it lies on the reply topic; `partial` and `usage` are what it says of the
    output so far.
    """

    def __init__(self, message: str, event: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.event = event
        self.job_id: str = event.get("job_id", "")
        self.run: int = event.get("run", 0)
        self.partial: Mapping[str, Any] | None = event.get("partial")
        self.usage: Mapping[str, Any] | None = event.get("usage")


class JobFailed(JobEnded):
    """`retriable` means: the same job may succeed when it is published again with `run` + 1."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        error = object_or_empty(event.get("error"))
        self.code: str = str(error.get("code", "internal"))
        self.message: str = str(error.get("message", "no message"))
        self.retriable: bool = bool(error.get("retriable"))
        self.dead_letter: Mapping[str, Any] | None = error.get("dead_letter")
        super().__init__(f"job {event.get('job_id')} failed: {self.code}: {self.message}", event)


class JobCancelled(JobEnded):
    def __init__(self, event: Mapping[str, Any]) -> None:
        super().__init__(f"job {event.get('job_id')} was cancelled", event)


class JobExpired(JobEnded):
    def __init__(self, event: Mapping[str, Any]) -> None:
        super().__init__(f"job {event.get('job_id')} expired: its deadline passed before it ended", event)


def object_or_empty(value: object) -> Mapping[str, Any]:
    """A JSON object of an event; whatever else stands in its place says nothing."""
    return value if isinstance(value, dict) else {}


def ended(event: Mapping[str, Any]) -> JobEnded | None:
    """The exception that a terminal event stands for; None for `completed`."""
    match event.get("type"):
        case "completed":
            return None
        case "cancelled":
            return JobCancelled(event)
        case "expired":
            return JobExpired(event)
        case _:
            return JobFailed(event)

"""What may go wrong with a job, one stable code each.

Refusal                      the job ends `failed` (or `expired`, `cancelled`) with a code; never retried
├── InvalidJob               invalid_job
├── InvalidRequest           invalid_request
├── ContextLengthExceeded    context_length_exceeded
├── ModelNotFound            model_not_found
├── Expired                  ends `expired`
├── Cancelled                ends `cancelled`
└── (any other code by Refusal(code, message))
Undeliverable                no usable reply address: the record becomes a dead letter
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """`error.code` of a `failed` event. A code keeps its meaning for ever; new ones may be added."""

    INVALID_JOB = "invalid_job"
    INVALID_REQUEST = "invalid_request"
    UNKNOWN_TENANT = "unknown_tenant"
    NOT_AUTHORIZED = "not_authorized"
    REPLY_TOPIC_REFUSED = "reply_topic_refused"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    QUOTA_EXCEEDED = "quota_exceeded"
    ID_CONFLICT = "id_conflict"
    INPUT_UNAVAILABLE = "input_unavailable"
    STORE_UNAVAILABLE = "store_unavailable"
    ENGINE_FAILED = "engine_failed"
    POISON_JOB = "poison_job"
    OUTPUT_TOO_LARGE = "output_too_large"
    INTERNAL = "internal"


# Codes after which the same job may succeed if it is published again with `run` + 1.
RETRIABLE = frozenset(
    {ErrorCode.INPUT_UNAVAILABLE, ErrorCode.STORE_UNAVAILABLE, ErrorCode.ENGINE_FAILED, ErrorCode.INTERNAL}
)


class Refusal(Exception):
    """A job that ends without a result. `message` says what is wrong and what to do, and never echoes input."""

    terminal = "failed"

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def retriable(self) -> bool:
        return self.code in RETRIABLE


class InvalidJob(Refusal):
    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_JOB, message)


class InvalidRequest(Refusal):
    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message)


class ContextLengthExceeded(Refusal):
    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)


class ModelNotFound(Refusal):
    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.MODEL_NOT_FOUND, message)


class Expired(Refusal):
    """The deadline passed before the job ended; `code` is not on the wire for this one."""

    terminal = "expired"

    def __init__(self, message: str = "the deadline passed before the job ended") -> None:
        super().__init__(ErrorCode.INTERNAL, message)


class Cancelled(Refusal):
    """Somebody asked for the job to be stopped; `code` is not on the wire for this one."""

    terminal = "cancelled"

    def __init__(self, message: str = "the job was cancelled") -> None:
        super().__init__(ErrorCode.INTERNAL, message)


class Undeliverable(Exception):
    """No event can reach the caller: the record becomes a dead letter with this reason."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

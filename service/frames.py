"""What travels between the worker and its delivery process: typed tuples, msgpack-encoded, in lists.

Worker → delivery: `Open`, `Deltas`, `End`, `Waiting`, `Dead`, `Unanswered`, `Lease`, `Barrier`, `Release`.
Delivery → worker: `Ended`, `Broken`, `Vanished`, `BarrierDone`, `Pressure`.

Frames are written on the engine's loop, so they are as small as they can be and hold no logic. Times are wall-clock
seconds unless a name says `monotonic`; CLOCK_MONOTONIC is one clock for both processes.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Frame(msgspec.Struct, array_like=True, gc=False):
    """Base of all frames: encoded as arrays, never part of a reference cycle."""


class Usage(Frame):
    """Token counts of an attempt; `completion` counts all choices, special and held-back tokens included."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


class Timing(Frame):
    """When an attempt passed each stage; None = it never did."""

    received: float  # registered by the consumer
    admitted: float | None = None  # picked by the scheduler
    submitted: float | None = None  # accepted by the engine
    scheduled: float | None = None  # first scheduled by the engine (end of its own queue)
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


class Error(Frame):
    code: str
    message: str
    retriable: bool = False


class Delta(Frame):
    """What one engine output adds to one choice. `tokens` counts special and held-back ones too."""

    index: int
    text: str
    tokens: int
    logprobs: Any = None  # OpenAI's shape for the endpoint: chat {"content": [...]}, completions {"tokens": [...], ...}
    tool_calls: list[dict[str, Any]] | None = None  # OpenAI delta form, arguments as fragments
    reasoning: str | None = None
    finish_reason: str | None = None  # OpenAI's values only; set on a choice's last delta
    stop_reason: str | int | None = None


class Head(Frame, kw_only=True):
    """What the delivery process must know of a job."""

    topic: str  # place of the record
    partition: int
    offset: int
    epoch: int
    origin: str  # "topic/partition/offset"
    job_id: str
    run: int
    tenant: str
    tier: str
    endpoint: str
    model: str
    reply_topic: str
    reply_partition: int | None
    stream: bool
    progress: bool
    inline_max_bytes: int
    store: str
    ttl_days: int | None
    metadata: dict[str, str] | None
    digest: str
    trace: dict[str, str]
    broker_time: float  # seconds; the record's LogAppendTime


class Open(Frame, tag="open", kw_only=True):
    """A new attempt. `announce`: send `started` now (False for refusals, whose only event is their terminal)."""

    stream: int
    head: Head
    attempt: str  # ULID
    number: int  # 1 for the first attempt of this job known to this worker
    announce: bool
    prompt_tokens: int
    at: float


class Deltas(Frame, tag="d"):
    stream: int
    deltas: list[Delta]


class Dead(Frame, tag="dead", kw_only=True):
    """A dead letter: the original record whole (R15). With `stream` = None it alone completes the record."""

    topic: str
    partition: int
    offset: int
    epoch: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    origin: str
    code: str
    message: str
    attempts: int
    at: float


class Answer(Frame, kw_only=True):
    """The terminal event of the first copy of a job, for a further copy of it (R7), and what its status record says."""

    event: bytes  # as it goes out
    attempt: str  # of the first copy, as `seq` is
    seq: int
    usage: dict[str, Any] | None = None
    code: str | None = None
    output: dict[str, Any] | None = None


class End(Frame, tag="end", kw_only=True):
    """The attempt's end. `kind`: completed, failed, cancelled, expired, or abandoned (not a terminal).

    `undeliverable` is the link's own answer to `Vanished`: no event, a dead letter and a status record.
    `repeat`: the end of a further record of a job, whose own end another status record tells (R7).
    """

    stream: int
    kind: str
    usage: Usage
    timing: Timing
    error: Error | None = None
    dead: Dead | None = None  # written and acknowledged before the terminal event
    answer: Answer | None = None  # goes out instead of an event of this attempt
    repeat: bool = False


class Waiting(Frame, tag="w", kw_only=True):
    """A `waiting` event for a job that has no attempt yet; outside the numbering."""

    head: Head
    reason: str
    since: float


class Lease(Frame, tag="lease"):
    """Terminals and chunks may go out until this monotonic time (R5)."""

    until_monotonic: float


class Barrier(Frame, tag="barrier"):
    """Hold all terminals and chunks from now on; answer `BarrierDone` once what is in flight is settled (≤ 1 s)."""

    number: int


class Release(Frame, tag="release"):
    """End of a barrier. Streams of `lost` (topic, partition) get `abandoned` and are dropped; the others go on."""

    number: int
    lost: list[tuple[str, int]]


class Unanswered(Frame, tag="unanswered", kw_only=True):
    """A record that nobody is answered about: a cancel that was not believed. It gets its span, and nothing else.

    `code` as in an `Error`; what the record names (`tenant`, `job_id`) is not known to be true.
    """

    topic: str
    partition: int
    offset: int
    tenant: str
    job_id: str
    code: str
    trace: dict[str, str]
    broker_time: float
    at: float


ToDelivery = Open | Deltas | End | Waiting | Dead | Lease | Barrier | Release | Unanswered


class Ended(Frame, tag="ended", kw_only=True):
    """Everything a job sent is acknowledged (R6). `stream` is None for a `Dead` without one."""

    stream: int | None
    topic: str
    partition: int
    offset: int
    epoch: int
    kind: str  # the End's kind, or "dead", or "undeliverable"
    status_offset: int | None = None  # where the status record landed
    bytes: int = 0
    chunks: int = 0
    stored: bool = False


class Broken(Frame, tag="broken"):
    """A chunk could not be sent: this stream's attempt is over, go on under a new one (R9)."""

    stream: int


class Vanished(Frame, tag="vanished"):
    """This stream's reply topic is gone, or refuses its records (R16): it must end `undeliverable`, with its record."""

    stream: int
    message: str


class BarrierDone(Frame, tag="barrier-done"):
    number: int


class Pressure(Frame, tag="pressure", kw_only=True):
    """Sent every 0.5 s: bytes not yet acknowledged, and counters since the last one for /metrics.

    `store`: why the object store counts as away; None while it takes outputs.
    """

    unacknowledged: int
    counters: dict[str, float]
    store: str | None = None


FromDelivery = Ended | Broken | Vanished | BarrierDone | Pressure

"""What a running worker says of its engine, read from its /metrics, and where it differs from the formula."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from service.capacity.memory import Plan
from service.telemetry import families as names

# Seconds the worker's HTTP side has for its answer.
ANSWER_S = 5.0
# A larger difference is worth a warning.
TOLERANCE = 0.10


class NoReport(Exception):
    """The worker does not answer, or its engine has not started. One line."""


@dataclass(frozen=True, slots=True)
class Report:
    """Of the engine in use, as it reported itself when it had started."""

    model: str
    version: str
    kv_tokens: int
    block: int
    context: int
    slots: int
    preemptions: int = 0

    @property
    def simulated(self) -> bool:
        return self.model.startswith("simulated:")

    @property
    def on_cpu(self) -> bool:
        return self.version.endswith(" cpu")

    @property
    def full(self) -> float:
        return self.kv_tokens / self.context if self.context else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    what: str
    formula: float
    engine: float

    @property
    def share(self) -> float:
        """(formula − engine) ÷ engine."""
        if self.formula == self.engine:
            return 0.0
        return (self.formula - self.engine) / self.engine if self.engine else float("inf")

    @property
    def large(self) -> bool:
        return abs(self.share) > TOLERANCE


def fetch(url: str) -> Report:
    """`url`: the worker's HTTP side, with or without scheme. Raises NoReport."""
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=ANSWER_S) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NoReport(f"no worker answers at {base} ({reason}): its address is in its log line `listening`") from None
    return read(text, base)


def read(text: str, source: str) -> Report:
    """From a scrape's text. Raises NoReport."""
    values: dict[str, float] = {}
    info: dict[str, str] = {}
    for name, labels, value in _samples(text):
        if name == names.ENGINE_INFO.full_name:
            info = labels
        elif not labels:
            values[name] = value
    if not info:
        raise NoReport(f"the worker at {source} has no engine to report: it is starting, or older than this command")
    return Report(
        model=info.get("model", ""),
        version=info.get("version", ""),
        kv_tokens=int(values.get(names.KV_TOKENS.full_name, 0)),
        block=int(values.get(names.KV_BLOCK.full_name, 0)),
        context=int(values.get(names.CONTEXT.full_name, 0)),
        slots=int(values.get(names.SLOTS.full_name, 0)),
        preemptions=int(values.get(names.PREEMPTIONS.full_name, 0)),
    )


def compare(plan: Plan, report: Report) -> list[Difference]:
    return [
        Difference("KV tokens", plan.kv_tokens, report.kv_tokens),
        Difference("context", plan.context, report.context),
        Difference("sequences", plan.slots, report.slots),
        Difference("full contexts", round(plan.full, 2), round(report.full, 2)),
    ]


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value

"""One structured line per event on stderr: logfmt or JSON. Owns format, levels and the rate limit of noisy libraries.

Our modules write `log.warning("attempt failed job=%s cause=%s", job_id, cause)`: the words are the event, each
`name=%s` is a field. Prompts and outputs are never arguments of a log call; as a second fence values and messages are
cut, and an exception's message is left out where its class is known to quote input.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType

from pydantic_core import ValidationError

from service.settings import Settings

MAX_VALUE_CHARS = 500  # a field or message; enough for any of ours, too little for a prompt
MAX_FRAMES = 12  # of a traceback, the innermost

# aiokafka logs 890 lines in 10 s while the broker is away: each distinct line may come so often per window.
WINDOW_S = 10.0
LINES_PER_WINDOW = 3
MAX_KEYS = 1024  # distinct lines remembered

# Libraries that repeat themselves; and the level from which they are heard at all.
NOISY = {
    "aiokafka": logging.WARNING,
    "faststream": logging.WARNING,
    # The tracer reports once that the collector is away, and once that it is back; the exporter at every batch.
    "opentelemetry": logging.CRITICAL,
    "urllib3": logging.ERROR,
    "uvicorn": logging.WARNING,
    "asyncio": logging.WARNING,
}

_FIELD = re.compile(r"(\w+)=%[-#0 +]*\d*(?:\.\d+)?[a-z]")
_PLACEHOLDER = re.compile(r"%%|(%)")  # group 1: one that takes an argument
_BARE = re.compile(r"[^\s\"=\\]+")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def configure(settings: Settings, process: str = "worker") -> None:
    """Sets up the root logger of this process; called once, first thing. Replaces what libraries set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process, as_json=settings.log_format == "json"))
    handler.addFilter(RepeatLimit(tuple(NOISY)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name, level in NOISY.items():
        logging.getLogger(name).setLevel(max(level, root.level))
    logging.captureWarnings(True)


class LineFormatter(logging.Formatter):
    """A record as one line: time, level, process, logger, event, the fields of the message, the exception."""

    def __init__(self, process: str, *, as_json: bool) -> None:
        super().__init__()
        self._process = process
        self._write: Callable[[dict[str, object]], str] = _json if as_json else _logfmt

    def format(self, record: logging.LogRecord) -> str:
        event, fields = split(record)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "ts": at,
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": event,
        }
        for name, value in fields.items():
            line[name if name not in line else f"{name}_"] = value
        suppressed = getattr(record, "suppressed", 0)
        if suppressed:
            line["suppressed"] = suppressed
        if record.exc_info and record.exc_info[1] is not None:
            line["error"], line["trace"] = describe(record.exc_info[1])
        return self._write(line)


def split(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """Event and fields of a record. A message that does not consist of words and `name=%s` stays in one piece."""
    template, values = str(record.msg), record.args
    names = _FIELD.findall(template)
    wanted = sum(1 for argument in _PLACEHOLDER.findall(template) if argument)
    if not isinstance(values, tuple) or not names or not len(names) == wanted == len(values):
        return _cut(_message(record)), {}
    event = _FIELD.sub("", template).strip().replace("%%", "%")
    return " ".join(event.split()), {name: _plain(value) for name, value in zip(names, values, strict=False)}


def describe(error: BaseException) -> tuple[str, str]:
    """(class and message, innermost frames) of an exception, on one line each. No source text, no local values."""
    name = type(error).__qualname__
    message = "" if isinstance(error, ValidationError) else _cut(str(error))
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    return f"{name}: {message}" if message else name, " < ".join(
        f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )


class RepeatLimit(logging.Filter):
    """Lets each distinct line of the named libraries through a few times per window, then counts what it holds back.

    Without it a broker that is away fills the disk and hides the one line that matters. The count goes out with the
    next line of its kind.
    """

    def __init__(self, loggers: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._loggers = frozenset(loggers)
        self._clock = clock
        self._seen: OrderedDict[tuple[str, str], list[float]] = OrderedDict()  # → [window's start, let through, held]

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in self._loggers:
            return True
        # Without arguments the text itself differs from line to line: then the logger alone is the key.
        key = (record.name, str(record.msg) if record.args else "")
        now = self._clock()
        state = self._seen.setdefault(key, [now, 0, 0])
        if len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        if now - state[0] >= WINDOW_S:
            state[0], state[1] = now, 0
        if state[1] >= LINES_PER_WINDOW:
            state[2] += 1
            return False
        state[1] += 1
        if state[2]:
            record.suppressed = int(state[2])
            state[2] = 0
        return True


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a wrong placeholder must not lose the line
        return str(record.msg)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, bool)) or value is None else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}… ({len(text)} characters)"


def _json(line: dict[str, object]) -> str:
    return json.dumps(line, ensure_ascii=False, default=str)


def _logfmt(line: dict[str, object]) -> str:
    return " ".join(f"{name}={_quoted(value)}" for name, value in line.items())


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)

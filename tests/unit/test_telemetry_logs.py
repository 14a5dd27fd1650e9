"""One line per event, its fields readable by a machine, and no flood from libraries."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from service.settings import Settings
from service.telemetry.logs import LINES_PER_WINDOW, WINDOW_S, LineFormatter, RepeatLimit, configure


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """A logger `t` that writes JSON lines into a string."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter("worker", as_json=True))
    log = logging.getLogger("t")
    log.handlers, log.propagate, log.level = [handler], False, logging.DEBUG
    yield out
    log.handlers, log.propagate = [], True


LOG = logging.getLogger("t")


def line(written: io.StringIO) -> dict[str, object]:
    (text,) = written.getvalue().splitlines()
    return json.loads(text)


def test_fields_of_a_message_are_fields_of_the_line(written: io.StringIO) -> None:
    LOG.warning("attempt failed job=%s attempt=%d cause=%s after=%.1f", "j 1", 2, ValueError("no"), 0.5)
    found = line(written)
    assert found["event"] == "attempt failed" and found["level"] == "warning" and found["logger"] == "t"
    assert (found["job"], found["attempt"], found["cause"], found["after"]) == ("j 1", 2, "no", 0.5)
    assert str(found["ts"]).endswith("Z") and found["process"] == "worker"


@pytest.mark.parametrize(
    ("template", "args", "event"),
    [
        ("engine ready in %s s", (3,), "engine ready in 3 s"),
        ("job=%s is %s", ("a", "b"), "job=a is b"),
        ("wrong job=%s", (), "wrong job=%s"),
        ("100 %%  job=%s", ("a",), "100 %"),
    ],
)
def test_other_messages_stay_whole(written: io.StringIO, template: str, args: tuple[object, ...], event: str) -> None:
    LOG.info(template, *args)
    assert line(written)["event"] == event


def test_a_wrong_placeholder_does_not_lose_the_line() -> None:
    record = logging.LogRecord("t", logging.INFO, "", 0, "wrong %d", ("x",), None)
    assert LineFormatter("worker", as_json=False).format(record).endswith('event="wrong %d"')


def test_a_field_never_hides_a_column(written: io.StringIO) -> None:
    LOG.info("hello level=%s", "x")
    assert line(written)["level"] == "info" and line(written)["level_"] == "x"


def test_logfmt_quotes_what_needs_it() -> None:
    record = logging.LogRecord("t", logging.INFO, "", 0, "got a=%s b=%s c=%s", ("x", 'two "words"\n', 1.25), None)
    text = LineFormatter("delivery", as_json=False).format(record)
    assert text.endswith('process=delivery logger=t event=got a=x b="two \\"words\\"\\n" c=1.25')
    assert "\n" not in text


def test_long_values_are_cut(written: io.StringIO) -> None:
    LOG.info("got text=%s", "p" * 10_000)
    assert len(str(line(written)["text"])) < 600


def test_an_exception_is_one_line_without_source_text(written: io.StringIO) -> None:
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        LOG.exception("it broke job=%s", "j1")
    found = line(written)
    assert found["error"] == "RuntimeError: first\nsecond" and found["job"] == "j1"
    assert "test_telemetry_logs.py" in str(found["trace"]) and "raise RuntimeError" not in str(found["trace"])


def test_a_validation_error_does_not_quote_its_input(written: io.StringIO) -> None:
    class Model(BaseModel):
        number: int

    try:
        Model.model_validate({"number": "a secret prompt"})
    except ValueError:
        LOG.exception("refused")
    assert line(written)["error"] == "ValidationError"
    assert "secret" not in written.getvalue()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def noise(name: str = "aiokafka.conn", text: str = "Unable to connect to %s", *args: object) -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "", 0, text, args, None)


def test_a_line_that_repeats_is_held_back_and_counted() -> None:
    clock = Clock()
    limit = RepeatLimit(("aiokafka",), clock)
    passed = [limit.filter(noise("aiokafka.conn", "Unable to connect to %s", f"broker-{i}")) for i in range(890)]
    assert sum(passed) == LINES_PER_WINDOW
    assert limit.filter(noise("aiokafka.conn", "Something else %s", 1))
    clock.now = WINDOW_S
    record = noise("aiokafka.conn", "Unable to connect to %s", "b")
    assert limit.filter(record) and record.suppressed == 890 - LINES_PER_WINDOW  # type: ignore[attr-defined]
    record = noise("aiokafka.conn", "Unable to connect to %s", "b")
    assert limit.filter(record) and not hasattr(record, "suppressed")


def test_texts_that_differ_each_time_count_as_one_line() -> None:
    limit = RepeatLimit(("aiokafka",), Clock())
    assert sum(limit.filter(noise("aiokafka.client", f"failed at {i}")) for i in range(5_000)) == LINES_PER_WINDOW
    for i in range(5_000):
        limit.filter(noise("aiokafka.client", f"text {i} %s", 1))
    assert len(limit._seen) <= 1024


def test_our_own_lines_are_never_held_back() -> None:
    limit = RepeatLimit(("aiokafka",), Clock())
    assert all(limit.filter(noise("service.runner", "attempt failed job=%s", i)) for i in range(100))


def test_configuration_takes_level_and_form_from_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure(Settings(log_level="warning", log_format="json"), process="delivery")
        logging.getLogger("service.x").info("not shown")
        logging.getLogger("aiokafka.cluster").info("not shown either")
        logging.getLogger("service.x").warning("shown a=%s", 1)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(False)
    (text,) = [found for found in capsys.readouterr().err.splitlines() if found]
    assert (
        json.loads(text)["event"] == "shown"
        and json.loads(text)["a"] == 1
        and json.loads(text)["process"] == "delivery"
    )

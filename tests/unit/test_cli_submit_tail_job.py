"""What `submit` makes of its input, what `tail` and `job` say of events, and where `job` says the time went."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from client import ClientError, InvalidJob, Result, ResumeToken, Step, Submitted, UnknownTopic, Unreachable
from client.stream import Stream
from schemas.names import CHAT, COMPLETIONS, EMBEDDINGS
from service.cli import build, session
from service.cli.job import Account, as_json, bars, picture, stages
from service.cli.submit import _read, _show, read_job, summary
from service.cli.tail import MALFORMED, _judge, content, line
from service.cli.topic_log import TopicLog


@pytest.mark.parametrize(
    ("text", "endpoint", "made"),
    [
        ("hi", None, {"endpoint": CHAT, "body": {"messages": [{"role": "user", "content": "hi"}]}}),
        ("hi\n", "completions", {"endpoint": COMPLETIONS, "body": {"prompt": "hi"}}),
        ("hi", "embeddings", {"endpoint": EMBEDDINGS, "body": {"input": "hi"}}),
        ('{"messages": []}', None, {"endpoint": CHAT, "body": {"messages": []}}),
        (' {"prompt": "x"}', None, {"endpoint": COMPLETIONS, "body": {"prompt": "x"}}),
        ('{"input": "x", "body": {"input": "x"}, "endpoint": "/v1/embeddings"}', None, None),
        (
            '{"schema_version": 1, "id": "j", "tenant": "t", "body": {"prompt": "x"}, "endpoint": "/v1/completions"}',
            None,
            {"id": "j", "tenant": "t", "endpoint": COMPLETIONS, "body": {"prompt": "x"}},
        ),
    ],
)
def test_prompts_bodies_and_jobs_are_told_apart(text: str, endpoint: str | None, made: dict[str, Any] | None) -> None:
    if made is None:
        with pytest.raises(typer.BadParameter, match="blob reference"):
            read_job(text, endpoint=endpoint)
        return
    assert read_job(text, endpoint=endpoint) == made


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "empty"),
        ("{not json", "looks like JSON, but is not: .*; a prompt that begins with { goes through -f with a body"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', 'one job a file; for many see docs/client.md "Many jobs"'),
        ('{"prompt": "a"} and so on', "looks like JSON"),
        ('{"body": {}, "tennant": "x"}', "tennant"),
        ('{"body": 3}', "objects"),
    ],
)
def test_wrong_input_is_wrong_usage(text: str, names: str) -> None:
    with pytest.raises(typer.BadParameter, match=names):
        read_job(text, endpoint=None)


def test_spans_of_time() -> None:
    assert [session.seconds(text) for text in ("90", "90s", "15m", "2h", "1d", "0.5s")] == [
        90,
        90,
        900,
        7200,
        86400,
        0.5,
    ]
    for wrong in ("", "x", "-3s", "1w", "nan"):
        with pytest.raises(typer.BadParameter):
            session.seconds(wrong)


def test_errors_have_the_documented_exit_codes() -> None:
    assert [
        session.exit_code(error) for error in (Unreachable(""), UnknownTopic(""), InvalidJob(""), ClientError(""))
    ] == [
        3,
        3,
        2,
        1,
    ]


TIMINGS = {
    "queue_ms": 5.0,
    "admission_ms": 1.0,
    "prefill_ms": 20.0,
    "first_token_ms": 30.0,
    "per_token_ms": 7.0,
    "total_ms": 100.0,
}


def test_the_stages_add_up_to_the_whole_time() -> None:
    found = dict(stages(TIMINGS, kafka_ms=12.0))
    assert found == {
        "kafka": 12.0,
        "queue": 5.0,
        "admission": 1.0,
        "engine queue": 4.0,
        "prefill": 20.0,
        "decode": 70.0,
    }
    assert sum(found.values()) == 112.0
    assert stages({"total_ms": 1.0}) == []
    assert stages({"queue_ms": 2.0, "admission_ms": None, "total_ms": 3.0}) == [("queue", 2.0)]
    assert bars(stages(TIMINGS)).row_count == 6


def event(kind: str, attempt: str = "A", seq: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": kind, "job_id": "j", "run": 0, "tenant": "acme", "attempt": attempt, "seq": seq, **more}


def account(*events: dict[str, Any]) -> Account:
    made = Account("acme", "j")
    for offset, each in enumerate(events):
        record: Any = SimpleNamespace(topic="r", partition=1, offset=offset)
        made.take(each, record)
    return made


CHUNK: dict[str, Any] = {"offset": 0, "tokens": 2, "chunk": {}}


def test_an_account_follows_the_rules_for_readers() -> None:
    assert account().state == "queued or unknown" and not account().ended_well
    assert account(event("waiting", reason="quota")).state == "waiting"
    started = event("started", at="t", model="m", worker="w", trace_id="f" * 32)
    assert account(started).state == "running" and account(started).ended_well
    assert account(started, event("abandoned", seq=1)).state == "interrupted, will run again"
    ended = account(
        started,
        event("chunk", seq=1, **CHUNK),
        event("started", "B"),
        event("completed", "B", 1, timings=TIMINGS, at="2026-01-01T00:00:01Z", usage={}),
        event("failed", "A", 2, error={}),
    )
    assert (ended.state, ended.place, ended.ignored_ends, ended.ended_well) == ("completed", ("r", 1, 3), 1, True)
    told = as_json(ended, whole=True)
    assert told["suppressed"] == 1 and [one["tokens"] for one in told["attempts"]] == [2, 0]
    assert told["stages_ms"]["decode"] == 70.0 and told["terminal"] == {"topic": "r", "partition": 1, "offset": 3}
    ended.published_ms = 1_767_225_600_000 + 1000 - 100 - 12
    assert ended.kafka_ms == pytest.approx(12.0)
    failed = account(event("failed", error={"code": "internal"}))
    assert failed.state == "failed" and not failed.ended_well


def test_a_dead_job_is_known_by_its_status_alone() -> None:
    one = account()
    one.status = {"kind": "dead", "code": "poison_job"}
    assert one.state == "dead" and not one.ended_well and as_json(one, whole=True)["error"] == {"code": "poison_job"}


def test_events_are_told_in_a_line_and_ignored_ones_are_marked() -> None:
    chunk = event("chunk", seq=1, offset=0, tokens=2, chunk={"choices": [{"index": 0, "delta": {"content": "سلام\n"}}]})
    assert content(chunk) == "+2 'سلام\\n'"
    assert "\n" not in line(chunk, 1_767_225_600_000, Step.CHUNK).plain
    assert "ignored" in line(chunk, 0, Step.IGNORED).plain
    failed = event("failed", error={"code": "internal", "message": "[bold]broken[/]"})
    assert content(failed) == "internal: [bold]broken[/]" and "[bold]" in line(failed, 0, Step.END).plain
    for kind in ("waiting", "started", "completed", "cancelled", "expired", "abandoned"):
        assert kind in line(event(kind), 0, Step.END).plain


def test_the_summary_names_the_store_when_the_output_lies_there() -> None:
    ref = {"bucket": "outputs", "key": "k", "size": 1, "sha256": "0" * 64}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    result = Result.of({**event("completed"), "output": ref, "usage": usage}, ("r", 0, 0))
    told = summary(result, 1.5, 0.25)
    assert "3 + 4 tokens" in told and "2 cached" in told and "250 ms" in told and "outputs/k" in told
    again = Result.of({**event("completed"), "duplicate": True, "usage": usage}, ("r", 0, 0))
    assert "earlier record" in summary(again, 1.5, None) and "earlier record" not in told


CONFLICT: dict[str, Any] = {"error": {"code": "id_conflict", "message": "no", "retriable": False}}


def test_an_id_conflict_ends_nothing_once_an_attempt_has_begun() -> None:
    one = account(event("started"), event("failed", "B", **CONFLICT), event("completed", seq=1))
    assert (one.state, one.place) == ("completed", ("r", 1, 2))
    assert account(event("failed", "B", **CONFLICT)).state == "failed"
    readers: dict[tuple[str, str], Any] = {}
    steps = [_judge(readers, each) for each in (event("started"), event("failed", "B", **CONFLICT))]
    assert steps == [Step.STARTED, Step.IGNORED]


async def test_a_jobs_records_come_in_the_order_of_time_and_of_each_partition() -> None:
    def at(partition: int, offset: int, timestamp: int, key: bytes = b"j") -> Any:
        return SimpleNamespace(topic="r", partition=partition, offset=offset, timestamp=timestamp, key=key)

    one, two = [at(1, 0, 5), at(1, 1, 9)], [at(2, 0, 3), at(2, 1, 2), at(2, 2, 7), at(2, 3, 1, b"other")]

    class Log(TopicLog):
        answers: Sequence[Any] = ()

        async def read(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            for record in self.answers:
                yield record

    log = Log("nowhere")
    for log.answers in ([*one, *two], [*two, *one]):
        found = [(record.partition, record.offset) for record in await log.job("j", [], since_s=1.0)]
        assert found == [(2, 0), (2, 1), (1, 0), (2, 2), (1, 1)]


def test_a_mark_at_the_start_of_a_file_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_text("{}", encoding="utf-8-sig")
    assert _read(file) == "{}"


async def never(*_: Any) -> Any:
    raise AssertionError


async def shown(*events: dict[str, Any]) -> int:
    stream = Stream("acme", "j", 0, partition=0, offset=0, limit=9, streaming=True)
    job = Submitted(stream, ResumeToken("r", 0, 0, "acme", "j"), close=lambda _: None, cancel=never, fetch=None)
    showing = asyncio.create_task(_show(job, 0.0, 5.0, as_json=False))
    for offset, each in enumerate(events):
        stream.feed(each, offset)
        for _ in range(9):
            await asyncio.sleep(0)
    return await showing


def said(text: str, attempt: str, seq: int = 1) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}}
    return event("chunk", attempt, seq, offset=seq - 1, tokens=1, chunk={"choices": [choice]})


def completed(text: str) -> dict[str, Any]:
    return event("completed", "B", 9, response={"choices": [{"message": {"content": text}}]}, usage={})


async def test_a_job_that_starts_over_is_told_when_it_does_and_its_text_begins_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        await shown(event("started"), said("Thr", "A"), event("started", "B"), said("Three", "B"), completed("Three!"))
        == 0
    )
    out, err = capsys.readouterr()
    assert out == "Thr\nThree!\n" and err.startswith("[attempt 2: the job started over; what is above is void]\n")


async def test_what_the_stream_lost_is_told_before_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert await shown(event("started"), said("Thr", "A"), said("rivers", "A", 5), completed("Three rivers")) == 0
    out, err = capsys.readouterr()
    assert out == "Thr\nThree rivers\n" and "the whole answer follows" in err


@pytest.mark.parametrize(
    "odd",
    [
        event("chunk", tokens=1, chunk={"choices": 5}),
        event("chunk", tokens=1, chunk={"choices": [5]}),
        event("completed", usage=5),
        event("completed", output=5),
        event("failed", error=5),
    ],
)
def test_an_odd_event_is_malformed_and_nothing_worse(odd: dict[str, Any]) -> None:
    with pytest.raises(MALFORMED):
        line(odd, 0, Step.CHUNK)
    one = account(event("started"), odd)
    with contextlib.suppress(*MALFORMED):  # which `job` tells in a line
        as_json(one, whole=True)
        picture(one)


def test_an_event_is_one_line_whatever_its_names_hold() -> None:
    odd = {**event("zz\nz", at="x"), "job_id": "a\nb\x1b[2J", "seq": "1\n2"}
    assert line(odd, 0, Step.IGNORED).plain.count("\n") == 0 and "\x1b" not in line(odd, 0, Step.IGNORED).plain
    assert "a b" in line(event("failed", error={"code": "a\nb"}), 0, Step.END).plain


def test_ctrl_c_says_what_became_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was published when no broker was reached."""

    async def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("client.client.Client.__aenter__", interrupted)
    ended = CliRunner().invoke(build(), ["submit", "hi", "--bootstrap", "127.0.0.1:9"])
    assert ended.exit_code == 130 and ended.stderr.strip() == "left; nothing was published"

"""The local stack keeps its promises: `up` is idempotent and recovers, `down` leaves nothing. On real parts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from minio import Minio

from infra import ports, store
from infra.errors import PartFailed
from infra.kafka import Kafka
from infra.part import Ports
from infra.process import Command, strays
from infra.progress import Quiet
from infra.stack import Stack
from schemas import names
from service import topics
from service.settings import KafkaSettings, Settings

PARTS = {"kafka", "store", "zipkin", "collector"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One that these tests may break. The model has tests of its own."""
    one = Stack(tmp_path_factory.mktemp("own"), partitions=3, with_model=False, show=Quiet())
    try:
        yield one
    finally:
        one.down()


@pytest.fixture
def up(own: Stack) -> Stack:
    own.up()
    return own


def pids(stack: Stack) -> dict[str, int | None]:
    return {part.name: part.pid for part in stack.status()}


def kill(stack: Stack, part: str, number: signal.Signals = signal.SIGKILL) -> int:
    identity = stack.process(part).identity()
    assert identity is not None
    os.kill(identity.pid, number)
    if number is signal.SIGKILL:
        deadline = time.monotonic() + 10
        while identity.alive:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return identity.pid


def settings(stack: Stack, **changes: object) -> Settings:
    kafka = KafkaSettings(bootstrap=stack.addresses.bootstrap)
    return Settings(**{"partitions": 3, "kafka": kafka, **changes})  # type: ignore[arg-type]


def client(stack: Stack) -> Minio:
    endpoint = stack.addresses.store_endpoint
    return Minio(endpoint, access_key=store.ACCESS_KEY, secret_key=store.SECRET_KEY, region=store.REGION, secure=False)


async def test_up_ends_with_everything_ready(up: Stack) -> None:
    assert {part.name: part.state for part in up.status()} == dict.fromkeys(PARTS, "running")
    assert await topics.check(settings(up)) == []
    assert client(up).bucket_exists(store.BUCKET)


def test_a_span_reaches_the_viewer(up: Stack) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    request = urllib.request.Request(
        f"{up.addresses.otlp_endpoint}/v1/traces",
        data=orjson.dumps(span(trace)),
        headers={"Content-Type": "application/json"},
    )
    assert urllib.request.urlopen(request, timeout=5).status == 200
    deadline = time.monotonic() + 20
    while True:  # the Collector batches
        try:
            url = f"{up.addresses.zipkin}/api/v2/trace/{trace}"
            (seen,) = orjson.loads(urllib.request.urlopen(url, timeout=5).read())
            break
        except urllib.error.HTTPError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert seen["name"] == "probe" and seen["localEndpoint"]["serviceName"] == "test"


def span(trace: str) -> dict[str, object]:
    now = time.time_ns()
    one = {
        "traceId": trace,
        "spanId": "b7ad6b7169203331",
        "name": "probe",
        "kind": 1,
        "startTimeUnixNano": str(now),
        "endTimeUnixNano": str(now + 1_000_000),
    }
    service = {"attributes": [{"key": "service.name", "value": {"stringValue": "test"}}]}
    return {"resourceSpans": [{"resource": service, "scopeSpans": [{"spans": [one]}]}]}


def test_nothing_listens_beyond_the_loopback_address(up: Stack) -> None:
    known = {int(part.pid) for part in up.status() if part.pid}
    seen = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    for line in seen.splitlines():
        if any(f"pid={pid}," in line for pid in known):
            assert "127.0.0.1]:" in line or " 127.0.0.1:" in line, line


def test_a_second_up_changes_nothing(up: Stack) -> None:
    before, remembered = pids(up), (up.folder / "stack.json").stat().st_mtime_ns
    again = Stack(up.folder, with_model=False, show=Quiet())  # as another command would
    began = time.monotonic()
    assert again.up() == up.addresses
    assert again.changed == []
    assert pids(again) == before
    assert (up.folder / "stack.json").stat().st_mtime_ns == remembered
    assert time.monotonic() - began < 5


async def test_killed_parts_come_back_at_the_same_address_with_their_data(up: Stack) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=up.addresses.bootstrap, acks="all")
    await producer.start()
    sent = await producer.send_and_wait(names.REPLIES, b"kept", partition=0)
    await producer.stop()
    before, addresses = pids(up), up.addresses
    for part in ("kafka", "store"):
        kill(up, part)
    assert {part.name: part.state for part in up.status()}["kafka"] == "crashed"
    assert not up.running
    up.up()
    assert set(up.changed) == {"kafka", "store"}
    assert up.addresses == addresses
    after = pids(up)
    assert {name for name in PARTS if before[name] != after[name]} == {"kafka", "store"}
    consumer = AIOKafkaConsumer(names.REPLIES, bootstrap_servers=up.addresses.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        kept = await consumer.getone()
        assert (kept.value, kept.offset) == (b"kept", sent.offset)
    finally:
        await consumer.stop()


def test_a_part_that_runs_but_does_not_answer_is_replaced(up: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.startup.HUNG_S", 1.0)
    frozen = kill(up, "collector", signal.SIGSTOP)
    give_up = time.monotonic() + 30
    while {part.name: part.state for part in up.status()}["collector"] != "not answering":  # the signal is on its way
        assert time.monotonic() < give_up
    up.up()
    assert "collector" in up.changed  # on a busy machine another part may have been slow to answer as well
    assert pids(up)["collector"] != frozen
    assert not Path(f"/proc/{frozen}").exists()


def test_a_port_taken_meanwhile_is_exchanged_and_the_neighbour_follows(up: Stack) -> None:
    up.down()
    zipkin, kafka = up.status()[2].address, up.status()[0].address
    with (
        socket.create_server((ports.HOST, int(zipkin.rpartition(":")[2]))),
        socket.create_server((ports.HOST, int(kafka.rpartition(":")[2]))),
    ):
        at = up.up()
        assert at.zipkin != zipkin and at.bootstrap != kafka
        command = Path(f"/proc/{pids(up)['collector']}/environ").read_bytes()
        assert at.zipkin.encode() in command


def test_down_leaves_no_process_also_none_that_nobody_remembers(up: Stack) -> None:
    running = [pid for pid in pids(up).values() if pid]
    assert sorted(strays(up.folder)) == sorted(running)
    (up.folder / "run" / "zipkin.json").unlink()  # as after kill -9 of an `up` in the wrong moment
    stopped = up.down()
    assert set(stopped) == {"kafka", "store", "collector", "strays"}
    assert strays(up.folder) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)
    assert up.down() == []
    with pytest.raises(PartFailed, match="headrace up"):
        _ = up.addresses


def test_a_failed_up_stops_what_it_started_and_names_the_log(own: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    own.down()
    whole = Kafka.command

    def broken(part: Kafka, at: Ports, folder: Path) -> Command:
        good = whole(part, at, folder)
        return replace(good, argv=(*good.argv[:-1], "/does/not/exist.properties"))

    monkeypatch.setattr(Kafka, "command", broken)
    with pytest.raises(PartFailed, match="kafka ended while it started") as caught:
        own.up()
    assert str(own.folder / "logs" / "kafka.log") in str(caught.value) and "headrace up" in str(caught.value)
    assert caught.value.detail
    assert strays(own.folder) == []
    assert {part.state for part in own.status()} == {"stopped"}


def test_a_broker_that_creates_topics_by_itself_is_refused(own: Stack, monkeypatch: pytest.MonkeyPatch) -> None:  # R16
    own.down()
    whole = Kafka.command

    def creating(part: Kafka, at: Ports, folder: Path) -> Command:
        good = whole(part, at, folder)
        properties = Path(good.argv[-1])
        text = properties.read_text()
        assert "auto.create.topics.enable=false" in text
        properties.write_text(text.replace("auto.create.topics.enable=false", "auto.create.topics.enable=true"))
        return good

    monkeypatch.setattr(Kafka, "command", creating)
    with pytest.raises(topics.TopicsRefused, match=r"set auto\.create\.topics\.enable=false"):
        own.up()
    assert strays(own.folder) == []


def test_a_killed_up_is_cleaned_up_by_the_next_command(own: Stack) -> None:
    own.down()
    script = (
        "import sys; from pathlib import Path; from infra.stack import Stack\n"
        "Stack(Path(sys.argv[1]), with_model=False).up()"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(own.folder)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not strays(own.folder):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.kill()
    child.wait()
    assert strays(own.folder)  # they outlive it
    own.up()
    assert {part.state for part in own.status()} == {"running"}


def test_an_interrupted_up_stops_what_it_started(own: Stack) -> None:
    own.down()
    headrace = Path(sys.executable).parent / "headrace"
    child = subprocess.Popen(
        [headrace, "up"],
        env={**os.environ, "HEADRACE_STATE_DIR": str(own.folder), "HEADRACE_ENGINE__MODEL": "/none"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while not strays(own.folder):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 128 + signal.SIGTERM
    assert strays(own.folder) == []


# ── topics, on the same broker ──────────────────────────────────────────────────────────────────────────────────────


async def test_topics_are_applied_as_planned_mended_and_never_resized(up: Stack) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=up.addresses.bootstrap)
    await admin.start()
    try:
        other = settings(up, pool="other")
        missing = await topics.check(other)
        assert {finding.problem for finding in missing} == {"is missing"} and len(
            missing
        ) == 6  # its own; shared are there
        with pytest.raises(topics.TopicsRefused, match="headrace topics apply"):
            await topics.require(other)

        # Somebody made two by hand: one with too few partitions, one with the client's time and a setting of their own.
        small, clock = names.status_topic("other"), names.jobs_topic("other", "standard")
        await admin.create_topics(
            [NewTopic(small, 1, 1), NewTopic(clock, 3, 1, topic_configs={"retention.ms": "777777"})]
        )
        done = await topics.apply(other)
        assert len(done.created) == 4
        assert set(done.changed) == {small, clock}
        assert [finding.topic for finding in done.findings] == [small]
        assert [finding.topic for finding in await topics.check(other)] == [small]
        (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, clock, None)])
        now = {
            entry["config_names"]: entry["config_value"]
            for entry in answer.to_object()["resources"][0]["config_entries"]
        }
        assert now["message.timestamp.type"] == "LogAppendTime"
        assert now["retention.ms"] == "777777"  # theirs is kept

        await admin.delete_topics([small])
        deadline = time.monotonic() + 10
        while small in await admin.list_topics():
            assert time.monotonic() < deadline
        assert (await topics.apply(other)).created == [small]
        assert await topics.check(other) == []
        assert await topics.require(other) == 777.777  # what intake makes its horizon of
        again = await topics.apply(other)
        assert (again.created, again.changed, again.findings) == ([], [], [])
    finally:
        await admin.close()


async def test_the_broker_stamps_jobs_with_its_own_time(up: Stack) -> None:  # R13
    producer = AIOKafkaProducer(bootstrap_servers=up.addresses.bootstrap)
    await producer.start()
    try:
        place = await producer.send_and_wait(names.jobs_topic("default", "bulk"), b"x", timestamp_ms=1)
        assert place.timestamp_type == 1 and abs(place.timestamp / 1000 - time.time()) < 60
    finally:
        await producer.stop()


async def test_an_absent_broker_is_one_line_with_what_to_do() -> None:
    nowhere = Settings(kafka=KafkaSettings(bootstrap=f"127.0.0.1:{ports.pick()}"))
    with pytest.raises(topics.BrokerUnreachable, match="headrace up"):
        await topics.check(nowhere)


def test_the_command_line_says_the_same(up: Stack) -> None:
    def headrace(*arguments: str) -> tuple[int, dict[str, object]]:
        done = subprocess.run(
            [Path(sys.executable).parent / "headrace", *arguments, "--json"],
            capture_output=True,
            text=True,
            env={**os.environ, "HEADRACE_STATE_DIR": str(up.folder)},
            timeout=60,
        )
        return done.returncode, orjson.loads(done.stdout)

    code, said = headrace("status")
    assert code == 0 and said["ok"] is True and said["environment"] == up.environment()
    assert headrace("topics", "check") == (0, {"ok": True, "findings": []})
    code, said = headrace("topics", "check", "--partitions", "48")
    assert code == 1 and len(said["findings"]) == 6  # type: ignore[arg-type]
    assert headrace("down") == (0, {"ok": True, "stopped": ["kafka", "store", "zipkin", "collector"], "workers": []})
    code, said = headrace("status")
    assert code == 1 and said["environment"] == {}

"""`headrace selftest cache-isolation`: tests of a running service, made with jobs of its own."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import TracebackType
from typing import Annotated, Any, Self

import orjson
import typer
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from client import ClientError, Signer, UnknownTopic, Unreachable
from client.record import new_id
from schemas.events import TERMINAL
from schemas.keys import partition_of
from schemas.names import CHAT, H_AUTHORIZATION, SCHEMA_VERSION, jobs_topic
from schemas.tenants import Tenant
from service.bounded_stop import stop_within
from service.cli import session
from service.cli.known_tenants import known_tenants
from service.cli.terminal import Screen, say
from service.cli.topic_log import ANSWER_S
from service.selftest import Answer, CacheIsolation, NoAnswer, Outcome, Unsuitable, choose, sharing
from service.settings import Settings
from service.tenants import RegistryError

TIER = "interactive"  # so that a backlog is passed by
POLL_MS = 100


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Tests of the running service, with jobs of its own.", no_args_is_help=True)
    group.command("cache-isolation")(cache_isolation)
    group.callback()(lambda: None)  # keeps the command's name although it is the only one
    app.add_typer(group, name="selftest")


def cache_isolation(
    tenant: Annotated[
        list[str] | None, typer.Option(help="Twice: the tenants to hold against each other; else two of the registry.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model; the worker's served name by default.")] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=32, help="Length of the prompts: several of the engine's KV blocks.")
    ] = 600,
    partition: Annotated[
        int | None, typer.Option(min=0, help="The worker of this partition is tested; else the first tenant's.")
    ] = None,
    sign: Annotated[
        list[str] | None, typer.Option(help="TENANT=FILE, its private key; once a tenant, where jobs are signed.")
    ] = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for one answer.")] = "60s",
    pool: Annotated[str | None, typer.Option(help="The pool to test.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """Proves on the running engine that no tenant is served another's cached prompt.

    Publishes about 16 jobs of one output token. Exit codes: 0 isolated, 1 not, or not proved, 2 wrong usage, 3 not
    reachable.
    """
    found = session.settings(bootstrap, pool)
    served = model or found.engine.served_name
    limit_s = session.seconds(timeout)
    signers = signers_of(sign or [])
    wanted = tenant or list(signers)[:2]
    if len(wanted) > 2 or len(set(wanted)) < len(wanted):
        raise typer.BadParameter("name two different tenants", param_hint="--tenant")
    if found.identity == "signed" and len(signers) < 2:
        raise typer.BadParameter("jobs are signed here: give the keys of two tenants", param_hint="--sign")

    async def main() -> int:
        try:
            registry = [one for _, one in sorted((await known_tenants(found)).items())]
            if signers:
                registry = [one for one in registry if one.id in signers]
            first, second = choose(registry, wanted, served)
        except (RegistryError, Unsuitable) as refused:
            raise typer.BadParameter(str(refused)) from None
        shared = sharing(registry, served)
        problem: str | None = None
        probe = Probe(found, served, (first, second, *(shared or ())), signers, partition, limit_s)
        async with probe:
            test = CacheIsolation(probe, first, second, shared, prompt_tokens=prompt_tokens)
            try:
                await test.run()
            except NoAnswer as error:
                problem = str(error)
        outcome = test.outcome
        ok = outcome.ok and problem is None
        if json:
            _print_json(outcome, ok, problem, found.pool, probe.partition)
        else:
            show(outcome, Screen(highlight=False))
            for line in [check.says for check in outcome.checks if not check.ok] + ([problem] if problem else []):
                say(f"headrace: {line}", err=True)
        return 0 if ok else session.FAILED

    session.run(main())


class Probe:
    """Publishes one job at a time to one partition, whose worker is tested, and reads its end. A context manager.

    Without a given `partition` that of the first tenant's key.
    """

    def __init__(
        self,
        found: Settings,
        model: str,
        tenants: tuple[Tenant, ...],
        signers: dict[str, Signer],
        partition: int | None,
        limit_s: float,
    ) -> None:
        self._found = found
        self._model = model
        self._tenants = tenants
        self._signers = signers
        self._limit_s = limit_s
        self._given = partition
        self.partition = partition or 0
        self._producer: AIOKafkaProducer | None = None
        self._consumer: AIOKafkaConsumer | None = None

    def jobs(self, tenant: Tenant) -> str:
        if self._found.identity == "topic":  # the one that is made for it
            return jobs_topic(self._found.pool, tenant.tier, tenant.id)
        return jobs_topic(self._found.pool, TIER)

    def replies(self, tenant: Tenant) -> str:
        return tenant.reply_topic if self._found.identity == "trusted" else tenant.own_reply_topic

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                await self._connect()
        except (KafkaError, TimeoutError):
            await self._stop()
            kafka = self._found.kafka
            raise Unreachable(f"no Kafka broker answers at {kafka.bootstrap}{kafka.security.hint}") from None
        except BaseException:
            await self._stop()
            raise
        return self

    async def _connect(self) -> None:
        connection = self._found.kafka.connection()
        self._producer = AIOKafkaProducer(**connection, acks="all")
        self._consumer = consumer = AIOKafkaConsumer(
            **connection,
            enable_auto_commit=False,
            isolation_level="read_committed",
            max_partition_fetch_bytes=4 << 20,
        )
        await self._producer.start()
        await consumer.start()
        known = await consumer.topics()
        replies = sorted({self.replies(tenant) for tenant in self._tenants})
        for topic in (*(self.jobs(tenant) for tenant in self._tenants), *replies):
            if topic not in known:
                address = self._found.kafka.bootstrap
                raise UnknownTopic(f"there is no topic {topic} at {address}: headrace topics apply, or --pool")
        owner = self._tenants[0]
        count = len(await self._producer.partitions_for(self.jobs(owner)))
        self.partition = partition_of(owner.id, count) if self._given is None else self._given
        if self.partition >= count:
            raise typer.BadParameter(f"{self.jobs(owner)} has partitions 0 to {count - 1}", param_hint="--partition")
        places = [TopicPartition(topic, 0) for topic in replies]
        consumer.assign(places)
        await consumer.seek_to_end(*places)
        for place in places:
            await consumer.position(place)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def ask(self, tenant: Tenant, endpoint: str, prompt: str, **fields: Any) -> Answer:
        """Raises NoAnswer."""
        said = {"messages": [{"role": "user", "content": prompt}]} if endpoint == CHAT else {"prompt": prompt}
        job: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "id": f"selftest-{new_id()}",
            "tenant": tenant.id,
            "endpoint": endpoint,
            "body": {"model": self._model, "max_tokens": 1, "temperature": 0, **said, **fields},
            "reply": {"topic": self.replies(tenant), "partition": 0},
        }
        value = orjson.dumps(job)
        headers = []
        if (signer := self._signers.get(tenant.id)) is not None:
            token = signer.job(tenant=tenant.id, job_id=job["id"], pool=self._found.pool, value=value)
            headers.append((H_AUTHORIZATION, token.encode()))
        assert self._producer is not None
        topic = self.jobs(tenant)
        try:
            async with asyncio.timeout(self._limit_s):
                await self._producer.send_and_wait(
                    topic, value, key=tenant.id.encode(), partition=self.partition, headers=headers
                )
                return await self._end_of(job["id"].encode())
        except (KafkaError, TimeoutError):
            raise NoAnswer(
                f"no worker answered a job of {tenant.id} on partition {self.partition} of {topic} within "
                f"{self._limit_s:g} s: does one run for this pool, and is it ready? (--timeout)"
            ) from None

    async def _end_of(self, job: bytes) -> Answer:
        """The first terminal event in the log's order, and the worker of the last attempt that started before it."""
        assert self._consumer is not None
        worker = ""
        while True:
            for records in (await self._consumer.getmany(timeout_ms=POLL_MS)).values():
                for record in records:
                    if record.key != job:
                        continue
                    event = orjson.loads(record.value)
                    if event["type"] == "started":
                        worker = event.get("worker") or ""
                    elif event["type"] in TERMINAL:
                        return _answer(event, worker)

    async def _stop(self) -> None:
        parts = [part for part in (self._producer, self._consumer) if part is not None]
        self._producer = self._consumer = None
        for part in parts:
            await stop_within(ANSWER_S, part.stop())


def _answer(event: dict[str, Any], worker: str) -> Answer:
    usage, error = event.get("usage") or {}, event.get("error") or {}
    return Answer(
        worker=worker,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        code=None if event["type"] == "completed" else error.get("code") or event["type"],
        message=error.get("message") or "",
    )


def signers_of(given: list[str]) -> dict[str, Signer]:
    """`TENANT=FILE` of each. Raises typer.BadParameter."""
    found = {}
    for text in given:
        name, mark, file = text.partition("=")
        try:
            if not (name and mark and file):
                raise ClientError(f"{text!r} is not TENANT=FILE")
            found[name] = Signer.from_file(file)
        except ClientError as error:
            raise typer.BadParameter(str(error), param_hint="--sign") from None
    return found


def _print_json(outcome: Outcome, ok: bool, problem: str | None, pool: str, partition: int) -> None:
    document = {
        "ok": ok,
        "pool": pool,
        "partition": partition,
        "workers": sorted(outcome.workers),
        "checks": [asdict(check) for check in outcome.checks],
        "notes": outcome.notes,
        "error": problem,
    }
    session.print_json(document)


def show(outcome: Outcome, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for check in outcome.checks:
        mark = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        endpoint = check.endpoint.removeprefix("/v1/")
        table.add_row(mark, endpoint, check.name, " → ".join(check.tenants), escape(check.says))
    if outcome.checks:
        console.print(table)
    for note in outcome.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    if outcome.ok:
        console.print(f"isolated, on worker {escape(', '.join(outcome.workers))}", soft_wrap=True)

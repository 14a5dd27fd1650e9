"""Apache Kafka as one process, broker and controller in one (KRaft)."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType

from infra import java
from infra.cache import Artefact, Workshop
from infra.errors import PartFailed
from infra.part import DEV, NotReady, Ports
from infra.ports import HOST, answers
from infra.process import Command
from infra.secured import ADMIN, Secured
from schemas.security import PLAINTEXT, KafkaSecurity

VERSION = "4.4.0"
POM = DEV / "kafka-jars.xml"


def _fetch(folder: Path, workshop: Workshop) -> None:
    java.fetch_jars("kafka", POM, folder, workshop)


JARS = Artefact("kafka", f"downloading Apache Kafka {VERSION} (once, 45 MB)", (POM.read_text(),), _fetch, java.maven)


class Kafka:
    name = "kafka"
    ports: Mapping[str, int] = MappingProxyType({"kafka": 0, "kafka_controller": 0})
    peers: tuple[str, ...] = ()
    start_s = 90.0  # 3-9 s alone; more after a crash (log recovery) and beside a build on the same two cores
    stop_s = 20.0

    def command(self, ports: Ports, folder: Path) -> Command:
        """Writes the configuration; formats the data folder if that was not done, or not to its end."""
        home = folder / "kafka"
        data = home / "data"
        home.mkdir(parents=True, exist_ok=True)
        config = home / "server.properties"
        secured = Secured.read(folder)
        listeners = "kafka-open.properties" if secured is None else "kafka-secured.properties"
        template = Template((DEV / "kafka.properties").read_text() + "\n" + (DEV / listeners).read_text())
        names = {} if secured is None else secured.substitutes()
        config.touch(mode=0o600)  # it may hold a password
        config.write_text(
            template.substitute(names, host=HOST, port=ports["kafka"], control=ports["kafka_controller"], data=data)
        )
        machine = (
            str(java.find()),
            "-Xms64m",
            "-Xmx384m",
            *java.SMALL,
            f"-Dlog4j2.configurationFile={(DEV / 'kafka-log.xml').as_uri()}",
            "-cp",
            f"{JARS.folder}/*",
        )
        if not (data / "meta.properties").exists():
            self._format(machine, config, folder, secured.scram() if secured is not None else [])
        return Command((*machine, "kafka.Kafka", str(config)), cwd=home)

    def probe(self, ports: Ports, folder: Path) -> None:
        if not answers(ports["kafka"]):
            raise NotReady("it does not listen yet")
        secured = Secured.read(folder)
        asyncio.run(_ask(self.address(ports), PLAINTEXT if secured is None else secured.security(ADMIN)))

    def address(self, ports: Ports) -> str:
        return f"{HOST}:{ports['kafka']}"

    def _format(self, machine: tuple[str, ...], config: Path, folder: Path, users: list[str]) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        log = folder / "logs" / "kafka-format.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            code = subprocess.run(
                # A cluster id may begin with "-", so it is joined to its option.
                [*machine, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(config), *users],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name != "KAFKA_OPTS"},
                timeout=self.start_s,
            ).returncode
        if code != 0:
            raise PartFailed(
                "Kafka's data folder could not be formatted", remedy="make clean, then headrace up", log=log
            )


async def _ask(bootstrap: str, security: KafkaSecurity) -> None:
    """Raises NotReady until the broker is registered and a controller is elected."""
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaError

    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5000, **security.arguments())
    log = logging.getLogger("aiokafka")
    level = log.level
    log.setLevel(logging.CRITICAL)  # that a broker is not there yet is what we ask
    try:
        await client.start()
        cluster = await client.describe_cluster()
    except KafkaError as error:
        raise NotReady(f"it does not answer metadata ({type(error).__name__})") from error
    finally:
        await client.close()
        log.setLevel(level)
    if not cluster["brokers"]:
        raise NotReady("no broker has registered with the controller yet")

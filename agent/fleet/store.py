"""Where a fleet's files are kept: a folder or an S3-style bucket, behind the same few calls.

A file is there whole or not at all, and is read back and compared before anybody is told that it
is there. In a folder no symbolic link is followed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dsagent.agent.errors import USAGE, DsagentError

if TYPE_CHECKING:
    import pyarrow.fs as pafs

MAX_READ_BYTES = 64 << 20  # of a manifest
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A file in a store; `path` is relative to its root."""

    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Digest:
    bytes: int
    sha256: str


class Store(Protocol):
    """Its methods raise DsagentError where the store is gone, full or refuses."""

    @property
    def url(self) -> str:
        """As people name it."""

    def put(self, source: Path, path: str) -> Digest:
        """The file at `source` becomes `path`, whole or not at all; what is there has been read
        back and is the same."""

    def read(self, path: str) -> bytes:
        """At most MAX_READ_BYTES."""

    def digest(self, path: str) -> Digest | None:
        """Of what is there, read for it; None: nothing is."""

    def list(self, folder: str) -> Iterator[Found]:
        """All regular files below it, in order; none where it is not there."""

    def delete(self, path: str) -> None:
        """One file, if it is there, and folders that this leaves empty."""

    def arrow(self) -> tuple[pafs.FileSystem, str]:
        """For pyarrow's datasets: the file system, and the root there."""


def open_store(
    name: str,
    endpoint: str | None = None,
    ca_file: Path | None = None,
    *,
    must_exist: bool = False,
) -> Store:
    """`name`: a folder, or s3://bucket/prefix. Raises DsagentError (exit 2) for what is neither.

    `endpoint`: of the S3 service, such as https://objects.example.com; without it, and without
    the variables AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL, Amazon's. Keys come as Amazon's own
    tools take them: AWS_ACCESS_KEY_ID and so on, or a file. `must_exist`: a folder that is not
    there is an error, and no empty store (of a bucket that the service says itself).
    """
    if name.startswith("s3://"):
        from dsagent.agent.fleet.s3 import S3Store

        return S3Store(name, endpoint, ca_file)
    if "://" in name:
        raise DsagentError(
            f"{name[:80]!r}: a store is a folder or s3://bucket/prefix", exit_code=USAGE
        )
    if not name:
        raise DsagentError("a store needs a name", exit_code=USAGE)
    if must_exist and not Path(name).exists():
        raise DsagentError(
            f"{name[:80]}: no store there; `dsagent roll` makes one", exit_code=USAGE
        )
    from dsagent.agent.fleet.folder import FolderStore

    return FolderStore(Path(name))


def digest_of(stream: Any) -> Digest:
    """Of what can be read from it."""
    sha256, total = hashlib.sha256(), 0
    while chunk := stream.read(CHUNK_BYTES):
        sha256.update(chunk)
        total += len(chunk)
    return Digest(total, sha256.hexdigest())


def file_digest(path: Path) -> Digest:
    with open(path, "rb") as file:
        return digest_of(file)


def reason_of(error: Exception) -> str:
    """One short line: pyarrow's messages are long and say the request's XML."""
    if isinstance(error, OSError) and error.errno and error.strerror:
        return os.strerror(error.errno)
    return " ".join(str(error).split())[:200]

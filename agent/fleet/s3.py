"""A store that is a bucket of an S3-style service, by pyarrow's client (the AWS SDK).

An object appears when its upload is completed, so it is whole or not there; what a killed process
had uploaded of it is never seen (a bucket's rule for incomplete uploads removes it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dsagent.agent import streams
from dsagent.agent.clear_links import clear_links
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named
from dsagent.agent.fleet.store import (
    CHUNK_BYTES,
    MAX_READ_BYTES,
    Digest,
    Found,
    digest_of,
    file_digest,
    reason_of,
)
from dsagent.agent.url_text import shown

if TYPE_CHECKING:
    import pyarrow.fs as pafs

CONNECT_S, REQUEST_S = 5.0, 60.0
TRIES = 3
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CA_VARIABLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")


class S3Store:
    def __init__(self, url: str, endpoint: str | None, ca_file: Path | None) -> None:
        import pyarrow.fs as pafs

        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket or "?" in url or "@" in url or ".." in url.split("/"):
            raise DsagentError(f"{shown(url)!r} is not s3://bucket/prefix", exit_code=USAGE)
        self._root = "/".join([bucket, *filter(None, prefix.split("/"))])
        if ca_file is not None and b"BEGIN CERTIFICATE" not in read_named(ca_file):
            raise DsagentError(f"{ca_file}: no certificate in it (PEM)", exit_code=USAGE)
        scheme, address = _endpoint(endpoint or _first(_ENDPOINT_VARIABLES))
        # Amazon's newer checksums travel in trailers that other services store as data, or refuse;
        # what has been written is read back anyway.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        try:
            self._files = pafs.S3FileSystem(
                scheme=scheme,
                endpoint_override=address,
                # A service of one's own has no regions, and asking Amazon for its name would hang.
                region=_first(_REGION_VARIABLES) or ("us-east-1" if address else None),
                connect_timeout=CONNECT_S,
                request_timeout=REQUEST_S,
                retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=TRIES),
                tls_ca_file_path=_first(_CA_VARIABLES) if ca_file is None else str(ca_file),
                background_writes=False,
            )
        except (OSError, ValueError) as error:
            raise DsagentError(f"{url}: {reason_of(error)}") from error

    @property
    def url(self) -> str:
        return f"s3://{self._root}"

    def put(self, source: Path, path: str) -> Digest:
        wanted = file_digest(source)
        with self._saying("write", path):
            try:
                with (
                    open(source, "rb") as file,
                    self._files.open_output_stream(self._at(path), compression=None) as target,
                ):
                    while chunk := file.read(CHUNK_BYTES):
                        target.write(chunk)
                found = self._digest(path)
            except OSError:
                # Leaving the stream completes what had been uploaded so far.
                with suppress(OSError):
                    self._files.delete_file(self._at(path))
                raise
        if found != wanted:
            self.delete(path)
            raise DsagentError(f"{self.url}/{path}: not what was written")
        return found

    def read(self, path: str) -> bytes:
        with (
            self._saying("read", path),
            self._files.open_input_stream(self._at(path), compression=None) as file,
        ):
            content: bytes = file.read(MAX_READ_BYTES + 1)
        if len(content) > MAX_READ_BYTES:
            raise DsagentError(f"{self.url}/{path}: larger than {MAX_READ_BYTES >> 20} MiB")
        return content

    def digest(self, path: str) -> Digest | None:
        with self._saying("read", path):
            try:
                return self._digest(path)
            except FileNotFoundError:
                return None

    def _digest(self, path: str) -> Digest:
        with self._files.open_input_stream(self._at(path), compression=None) as file:
            return digest_of(file)

    def list(self, folder: str) -> Iterator[Found]:
        import pyarrow.fs as pafs

        with self._saying("look into", folder):
            wanted = pafs.FileSelector(self._at(folder), allow_not_found=True, recursive=True)
            infos = self._files.get_file_info(wanted)
        files = (info for info in infos if info.type == pafs.FileType.File)
        for info in sorted(files, key=lambda each: each.path):
            yield Found(info.path.removeprefix(f"{self._root}/"), info.size)

    def delete(self, path: str) -> None:
        """pyarrow puts an empty object in place of the folder, which some services refuse: what
        counts is whether the object is gone."""
        with self._saying("delete", path):
            try:
                self._files.delete_file(self._at(path))
            except OSError:
                if self._is_there(path):
                    raise

    def _is_there(self, path: str) -> bool:
        import pyarrow.fs as pafs

        found: bool = self._files.get_file_info(self._at(path)).type != pafs.FileType.NotFound
        return found

    def arrow(self) -> tuple[pafs.FileSystem, str]:
        return self._files, self._root

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _saying(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DsagentError(f"cannot {what} {self.url}/{path}: {reason_of(error)}") from error


def _first(variables: tuple[str, ...]) -> str | None:
    return next(filter(None, (os.environ.get(each) for each in variables)), None)


def _endpoint(url: str | None) -> tuple[str, str | None]:
    """Scheme and address; https unless the URL says otherwise, which is told where it is heard
    beyond this machine."""
    if url is None:
        return "https", None
    parts = urlsplit(url if "://" in url else f"https://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise DsagentError(
            f"{shown(url)!r} is not an endpoint such as https://objects.example.com",
            exit_code=USAGE,
        )
    for line in clear_links([(parts.scheme, parts.hostname)]):
        streams.tell(f"dsagent: {line}\n")
    return parts.scheme, parts.netloc.rpartition("@")[2]

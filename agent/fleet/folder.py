"""A store that is a folder. Each step of a path is opened from the one before without following
symbolic links, so nothing outside the folder is read, written or deleted."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.fleet.layout import UNFINISHED
from dsagent.agent.fleet.store import (
    CHUNK_BYTES,
    MAX_READ_BYTES,
    Digest,
    Found,
    digest_of,
    file_digest,
    reason_of,
)

if TYPE_CHECKING:
    import pyarrow.fs as pafs

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a link is not a folder of ours


class FolderStore:
    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise DsagentError(f"{root}: not a folder", exit_code=USAGE)
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def put(self, source: Path, path: str) -> Digest:
        wanted = file_digest(source)
        with self._saying("write", path):
            self._root.mkdir(parents=True, exist_ok=True)
            with self._folder(Path(path).parent, make=True) as folder:
                name = Path(path).name
                part = name + UNFINISHED
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)
                self._copy(source, part, folder)
                with self._open(part, folder) as file:
                    found = digest_of(file)
                if found != wanted:
                    os.unlink(part, dir_fd=folder)
                    raise DsagentError(f"{self.url}/{path}: not what was written; is the disk bad?")
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        return found

    @staticmethod
    def _copy(source: Path, part: str, folder: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o644, dir_fd=folder)
        try:
            with open(source, "rb") as file, os.fdopen(descriptor, "wb") as target:
                shutil.copyfileobj(file, target, CHUNK_BYTES)
                target.flush()
                os.fsync(target.fileno())
        except OSError:  # a full disk is not made fuller
            os.unlink(part, dir_fd=folder)
            raise

    def read(self, path: str) -> bytes:
        with self._saying("read", path), self._opened(path) as file:
            content = file.read(MAX_READ_BYTES + 1)
        if len(content) > MAX_READ_BYTES:
            raise DsagentError(f"{self.url}/{path}: larger than {MAX_READ_BYTES >> 20} MiB")
        return content

    def digest(self, path: str) -> Digest | None:
        with self._saying("read", path):
            try:
                with self._opened(path) as file:
                    return digest_of(file)
            except OSError as error:
                if error.errno in _NOT_THERE:
                    return None
                raise

    def list(self, folder: str) -> Iterator[Found]:
        with self._saying("look into", folder):
            yield from self._list(folder)

    def _list(self, folder: str) -> Iterator[Found]:
        try:
            with self._folder(Path(folder)) as descriptor, os.scandir(descriptor) as entries:
                children = [
                    (entry.name, entry.stat(follow_symlinks=False))
                    for entry in entries
                    if not entry.is_symlink()
                ]
        except OSError as error:
            if error.errno in _NOT_THERE:
                return
            raise
        for name, status in sorted(children):
            path = f"{folder}/{name}" if folder else name
            if stat.S_ISDIR(status.st_mode):
                yield from self._list(path)
            elif stat.S_ISREG(status.st_mode):
                yield Found(path, status.st_size)

    def delete(self, path: str) -> None:
        with self._saying("delete", path):
            try:
                with self._folder(Path(path).parent) as folder:
                    os.unlink(Path(path).name, dir_fd=folder)
            except OSError as error:
                if error.errno in _NOT_THERE:
                    return
                raise
            for emptied in Path(path).parents[:-1]:
                try:
                    with self._folder(emptied.parent) as folder:
                        os.rmdir(emptied.name, dir_fd=folder)
                except OSError:
                    return  # it holds more, or somebody has just put something there

    def arrow(self) -> tuple[pafs.FileSystem, str]:
        import pyarrow.fs as pafs

        return pafs.LocalFileSystem(), str(self._root.absolute())

    @contextmanager
    def _folder(self, path: Path, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder; `make`: with what is missing on the way there."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for step in path.parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(step, 0o755, dir_fd=descriptor)
                below = os.open(step, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    @staticmethod
    def _open(name: str, folder: int) -> BinaryIO:
        descriptor = os.open(name, _FILE, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file")
        return os.fdopen(descriptor, "rb")

    @contextmanager
    def _opened(self, path: str) -> Iterator[BinaryIO]:
        with self._folder(Path(path).parent) as folder, self._open(Path(path).name, folder) as file:
            yield file

    @contextmanager
    def _saying(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DsagentError(f"cannot {what} {self.url}/{path}: {reason_of(error)}") from error

"""Who may speak to what the agent listens on: loopback for everybody, anything wider with a token.

A bearer token out of a file, TLS from a certificate and its key, both read again once they have
changed on disk, so that Kubernetes may renew them. The files are named by the operator, but what
becomes of them later is checked each time: a new one that is wrong keeps the old one.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named
from dsagent.agent.settings import parse_address

MAX_TOKENS = 8  # one a line: while one is being replaced, the old and the new one
MIN_TOKEN_CHARS = 16

_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")  # what RFC 6750 lets a bearer token be made of
_BEARER = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +([A-Za-z0-9._~+/-]+=*)")
_Marks = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """What the flags say of everything that listens."""

    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    is_open: bool = False  # beyond loopback without a token: something else guards it


class Guard:
    """Shared by all that listens; may be asked from any thread."""

    def __init__(self, options: ListenOptions | None = None) -> None:
        """Raises DsagentError (exit 2) for a file that cannot be used."""
        options = options or ListenOptions()
        self._is_open = options.is_open
        self._lock = threading.Lock()
        self._token_file = options.token_file
        self._token_marks: _Marks = ()
        self._tokens: tuple[bytes, ...] = ()
        if (options.tls_cert is None) != (options.tls_key is None):
            raise DsagentError(
                "--listen-tls-cert and --listen-tls-key need each other: give both", exit_code=USAGE
            )
        self._pair: tuple[Path, Path] | None = None
        if options.tls_cert is not None and options.tls_key is not None:
            self._pair = (options.tls_cert, options.tls_key)
        self._pair_marks: _Marks = ()
        self._context: ssl.SSLContext | None = None
        self._pem: tuple[bytes, bytes] | None = None
        self._notices: dict[str, str] = {}  # by file: why what is new in it is not used
        if self._token_file is not None:
            self._token_marks = _marks(self._token_file)
            self._tokens = _read_tokens(self._token_file)
        if self._pair is not None:
            self._pair_marks = _marks(*self._pair)
            self._pem, self._context = _read_pair(*self._pair)

    @property
    def asks_for_token(self) -> bool:
        return self._token_file is not None

    @property
    def notice(self) -> str:
        """Why a file that has changed is not used; empty where all is well."""
        with self._lock:
            return "; ".join(self._notices.values())

    def admits(self, authorization: str | bytes | None) -> bool:
        """Whether a request with this header may be answered. Takes as long for any token."""
        if self._token_file is None:
            return True
        given = (
            authorization.encode("latin-1", "replace")
            if isinstance(authorization, str)
            else (authorization or b"")
        )
        found = _BEARER.fullmatch(given.strip())
        token = found[1] if found is not None else b""
        # Each is compared: none breaks off.
        return sum(hmac.compare_digest(token, each) for each in self._current_tokens()) > 0

    def _current_tokens(self) -> tuple[bytes, ...]:
        assert self._token_file is not None
        with self._lock:
            marks = _marks(self._token_file)
            if marks != self._token_marks:
                self._token_marks = marks
                try:
                    self._tokens = _read_tokens(self._token_file)
                    self._notices.pop("token", None)
                except DsagentError as error:
                    self._notices["token"] = f"the old token stays: {error}"
            return self._tokens

    def context(self) -> ssl.SSLContext | None:
        """For the next connection; None where none is asked for."""
        with self._lock:
            self._renew_pair()
            return self._context

    def pem(self) -> tuple[bytes, bytes] | None:
        """(key, certificate chain), for a library that does TLS itself."""
        with self._lock:
            self._renew_pair()
            return self._pem

    def _renew_pair(self) -> None:
        if self._pair is None:
            return
        marks = _marks(*self._pair)
        if marks == self._pair_marks:
            return
        self._pair_marks = marks
        try:
            self._pem, self._context = _read_pair(*self._pair)
            self._notices.pop("tls", None)
        except DsagentError as error:  # perhaps only one of the two has been renewed yet
            self._notices["tls"] = f"the old certificate stays: {error}"

    def place(self, host: str, port: int, flag: str) -> tuple[socket.AddressFamily, str]:
        """The address to bind for a host's name, which is not asked for again. Raises DsagentError
        (exit 2) where it has none, or is beyond loopback and nothing guards it."""
        try:
            family, _, _, _, where = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DsagentError(
                f"{flag} {host}:{port}: that host has no address here: {reason}", exit_code=USAGE
            ) from error
        address = str(where[0])
        if not (self._is_open or self.asks_for_token or is_loopback(address)):
            raise DsagentError(
                f"{flag} {host}:{port} would answer everybody who reaches this machine: give "
                "--listen-token-file FILE, or --listen-open where something else guards it",
                exit_code=USAGE,
            )
        return family, address


def make_guard(options: ListenOptions, addresses: Mapping[str, str | None]) -> Guard:
    """Checked at once, before anything is touched. `addresses`: HOST:PORT by the flag that says
    it, None where it was not given. Raises DsagentError (exit 2)."""
    refuse_shared(addresses)
    guard = Guard(options)
    for flag, address in addresses.items():
        if address is not None:
            guard.place(*parse_address(address), flag)
    return guard


def refuse_shared(addresses: Mapping[str, str | None]) -> None:
    """Raises DsagentError (exit 2) where two are to listen on one port: the second never could."""
    taken: list[tuple[str, str, int]] = []
    for flag, address in addresses.items():
        if address is None:
            continue
        host, port = parse_address(address)
        for other_flag, other_host, other_port in taken:
            if port and port == other_port and _overlap(host, other_host):
                raise DsagentError(
                    f"{flag} and {other_flag} are both to listen on port {port}: give each one of "
                    "its own",
                    exit_code=USAGE,
                )
        taken.append((flag, host, port))


def _overlap(host: str, other: str) -> bool:
    hosts = {"127.0.0.1" if each == "localhost" else each for each in (host, other)}
    same_family = len({":" in each for each in hosts}) == 1
    return len(hosts) == 1 or (same_family and not hosts.isdisjoint(("0.0.0.0", "::")))


def is_loopback(address: str) -> bool:
    """Of an address, not a name."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _marks(*paths: Path) -> _Marks:
    """What changes when a file does; all zero for one that is not there."""
    found = []
    for path in paths:
        try:
            seen = os.stat(path)
            found.append((seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns))
        except (OSError, ValueError):
            found.append((0, 0, 0, 0))
    return tuple(found)


def _check_secret(path: Path, flag: str) -> None:
    """Others may neither know a secret nor choose it."""
    try:
        seen = os.stat(path)
    except OSError as error:
        raise DsagentError(f"{flag}: cannot read {path}: {error.strerror}", exit_code=USAGE) from (
            error
        )
    if seen.st_uid not in (0, os.geteuid()):
        raise DsagentError(
            f"{flag}: {path} belongs to user {seen.st_uid}, who could change it: it must be "
            "root's or your own",
            exit_code=USAGE,
        )
    if seen.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise DsagentError(
            f"{flag}: others may read or write {path} (mode {stat.S_IMODE(seen.st_mode):04o}): "
            f"chmod 600 {path}, or defaultMode: 0400 of the Secret's volume",
            exit_code=USAGE,
        )


def _read_tokens(path: Path) -> tuple[bytes, ...]:
    """Raises DsagentError; its message never holds what the file does."""
    flag = "--listen-token-file"
    _check_secret(path, flag)
    tokens = tuple(line.strip() for line in read_named(path).splitlines() if line.strip())
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise DsagentError(
            f"{flag}: {path} holds {len(tokens)} tokens; put one a line, at most {MAX_TOKENS}",
            exit_code=USAGE,
        )
    for token in tokens:
        if len(token) < MIN_TOKEN_CHARS or _TOKEN.fullmatch(token) is None:
            raise DsagentError(
                f"{flag}: a token in {path} is shorter than {MIN_TOKEN_CHARS} characters, or has "
                "some beside letters, digits and ._~+/-; `openssl rand -hex 32` makes a good one",
                exit_code=USAGE,
            )
    return tokens


def _read_pair(cert: Path, key: Path) -> tuple[tuple[bytes, bytes], ssl.SSLContext]:
    """((key, chain), context). Raises DsagentError."""
    _check_secret(key, "--listen-tls-key")
    pem = read_named(key), read_named(cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a pass phrase would be asked for on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise DsagentError(
            f"--listen-tls-cert {cert} and --listen-tls-key {key} are no PEM certificate with its "
            f"unencrypted key: {getattr(error, 'reason', None) or error}",
            exit_code=USAGE,
        ) from error
    return pem, context

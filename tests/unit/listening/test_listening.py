"""Who may speak to what the agent listens on: tokens, certificates, addresses, and their files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.listening.admission import (
    Guard,
    ListenOptions,
    is_loopback,
    make_guard,
    refuse_shared,
)

TOKEN = "canary-0123456789abcdef"
OTHER = "other-0123456789abcdef"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def bearer(token: str) -> str:
    return f"Bearer {token}"


def test_only_the_right_token_is_admitted(token_file: Path) -> None:
    guard = Guard(ListenOptions(token_file))
    assert guard.admits(bearer(TOKEN))
    assert guard.admits(f"bearer  {TOKEN}")
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        bearer(TOKEN[:-1]),
        bearer(TOKEN + "0"),
        f"{bearer(TOKEN)}, {bearer(TOKEN)}",
        "Bearer \u20ac\u0000" + TOKEN,
    ):
        assert not guard.admits(wrong), wrong
    assert Guard().admits(None)


def test_a_new_token_counts_at_once_and_a_wrong_file_keeps_the_old_one(token_file: Path) -> None:
    guard = Guard(ListenOptions(token_file))
    token_file.write_text(f"{TOKEN}\n{OTHER}\n")
    assert guard.admits(bearer(TOKEN))
    assert guard.admits(bearer(OTHER))
    token_file.write_text(f"{OTHER}\n")
    assert not guard.admits(bearer(TOKEN))
    token_file.write_text("short\n")
    assert guard.admits(bearer(OTHER))
    assert "the old token stays" in guard.notice
    assert "short\n" not in guard.notice
    token_file.unlink()
    assert guard.admits(bearer(OTHER))
    token_file.write_text(f"{TOKEN}\n")
    token_file.chmod(0o600)
    assert guard.admits(bearer(TOKEN))
    assert guard.notice == ""


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (TOKEN, 0o644, "others may read or write .*0644.*chmod 600"),
        (TOKEN, 0o620, "others may read or write"),
        ("", 0o600, "holds 0 tokens"),
        ("\n".join([TOKEN] * 9), 0o600, "holds 9 tokens"),
        ("fifteen-chars-x", 0o600, "shorter than 16"),
        ("a token with spaces in it", 0o600, "letters, digits"),
        ("\x1b]0;token-with-an-escape", 0o600, "letters, digits"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_one_line_without_what_it_holds(
    token_file: Path, content: str, mode: int, message: str
) -> None:
    token_file.write_text(content)
    token_file.chmod(mode)
    with pytest.raises(DsagentError, match=message) as refused:
        Guard(ListenOptions(token_file))
    assert refused.value.exit_code == 2
    assert not content or content not in str(refused.value)
    assert TOKEN not in str(refused.value)


def test_a_token_file_of_somebody_else_is_refused(token_file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(token_file, 12345, 0)
    with pytest.raises(DsagentError, match="belongs to user 12345"):
        Guard(ListenOptions(token_file))


@pytest.mark.parametrize("name", ["missing", "folder", "fifo"])
def test_a_token_file_that_is_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir(mode=0o700)
    elif name == "fifo":
        os.mkfifo(path, 0o600)
    with pytest.raises(DsagentError, match=str(path)):
        Guard(ListenOptions(path))


def test_a_certificate_needs_its_key_and_both_must_be_right(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    for path in (cert, key):
        path.write_text("-----BEGIN NONSENSE-----\n")
        path.chmod(0o600)
    with pytest.raises(DsagentError, match="need each other"):
        Guard(ListenOptions(tls_cert=cert))
    with pytest.raises(DsagentError, match="no PEM certificate with its unencrypted key"):
        Guard(ListenOptions(tls_cert=cert, tls_key=key))
    key.chmod(0o644)
    with pytest.raises(DsagentError, match="others may read or write"):
        Guard(ListenOptions(tls_cert=cert, tls_key=key))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "::ffff:127.0.0.1"])
def test_beyond_loopback_only_with_a_token_or_when_said_so(host: str, token_file: Path) -> None:
    with pytest.raises(DsagentError, match="give --listen-token-file FILE, or --listen-open") as no:
        Guard().place(host, 9464, "--prometheus")
    assert no.value.exit_code == 2
    Guard(ListenOptions(token_file)).place(host, 9464, "--prometheus")
    Guard(ListenOptions(is_open=True)).place(host, 9464, "--prometheus")


def test_loopback_is_free_and_what_was_checked_is_what_is_bound() -> None:
    assert Guard().place("127.0.0.1", 1, "--prometheus") == (socket.AF_INET, "127.0.0.1")
    assert Guard().place("::1", 1, "--prometheus") == (socket.AF_INET6, "::1")
    assert is_loopback(Guard().place("localhost", 1, "--prometheus")[1])
    assert is_loopback("127.8.9.1")
    assert not is_loopback("fe80::1%eth0")


def test_a_host_without_an_address_is_one_line() -> None:
    for host in ("no-such-host.invalid", "x" * 300, "a..b"):
        with pytest.raises(DsagentError, match=r"--otlp-receive .* has no address here"):
            make_guard(ListenOptions(), {"--prometheus": None, "--otlp-receive": f"{host}:1"})


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("127.0.0.1:1", "127.0.0.1:1", True),
        ("0.0.0.0:1", "127.0.0.1:1", True),
        ("localhost:1", "127.0.0.1:1", True),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("127.0.0.1:1", "127.0.0.1:2", False),
        ("127.0.0.1:1", "[::1]:1", False),
        ("0.0.0.0:1", "[::1]:1", False),
        ("127.0.0.1:1", "127.0.0.2:1", False),
    ],
)
def test_two_that_are_to_listen_on_one_port_are_told_apart(
    one: str, other: str, shared: bool
) -> None:
    places = {"--prometheus": one, "--otlp-receive": None, "--otlp-receive-grpc": other}
    if not shared:
        refuse_shared(places)
        return
    with pytest.raises(DsagentError, match="--otlp-receive-grpc and --prometheus are both") as why:
        refuse_shared(places)
    assert why.value.exit_code == USAGE

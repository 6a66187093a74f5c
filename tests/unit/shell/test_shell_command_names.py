"""What is shown of a stranger's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsagent.agent.host.command_names import MAX_CHARS, command_name, named_by_script, shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/python3", "/home/bob/train.py", "--lr", "1"], "python3 train.py --lr 1"),
        (["python", "-m", "torch.distributed.run"], "python -m torch.distributed.run"),
        (["python", "x.py", "--api-key", "sk-0123456789abcdef"], "python x.py --api-key [secret]"),
        (["a\x1b[31m", "b\nc", "\u202e"], "a\\x1b[31m b c \\u202e"),
        ([], ""),
        # A secret with slashes is no path, whose last part would stand alone.
        (["x", "--api-key=abc/half"], "x --api-key=[secret]"),
        (["x", "--api-key", "abc/half"], "x --api-key [secret]"),
        (["curl", "-H", "Authorization: Bearer abc/half"], "curl -H Authorization:[secret]"),
        (["curl", "-H", "X-Mine: Bearer abcdefgh/half"], "curl -H X-Mine: Bearer [secret]"),
        # And is all of its word, whatever it holds.
        (["x", "a", "b", "--password=two words"], "x a b --password=[secret]"),
        (["x", "a", "b", "--password", "a,b;c'd e"], "x a b --password [secret]"),
        (["env", "DB_PASSWORD='a b'", "x"], "env DB_PASSWORD=[secret] x"),
        (["x", "--hf-token=123 4"], "x --hf-token=[secret]"),
        (["x", "--max-tokens=123"], "x --max-tokens=123"),
    ],
)
def test_short_masked_and_without_control_characters(words: list[str], expected: str) -> None:
    assert shown(words) == expected


def test_bounded() -> None:
    assert len(shown(["x" * 200_000])) == MAX_CHARS
    assert len(shown(["x"] * 200_000)) == MAX_CHARS


def test_of_a_process_that_is_gone() -> None:
    assert command_name(2**22 + 7) == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["/usr/bin/python3", "/home/bob/train.py", "--key", "k"], "python3 train.py"),
        (["python3", "-u", "-X", "dev", "train.py"], "python3 train.py"),
        (["python3.11", "-Im", "torch.distributed.run", "x"], "python3 -m torch.distributed.run"),
        (["python3", "-c", "password = 'hunter2'"], "python3 -c"),
        (["python3", "-cpassword = 'hunter2'", "hunter3"], "python3 -c"),
        (["python3", "-mvenv", "hunter2"], "python3 -m venv"),
        (["python3", "-Xdev", "-uWignore", "train.py"], "python3 train.py"),
        (["python3", "-uW", "ignore", "train.py"], "python3 train.py"),
        (
            ["python3", "-Xfrozen_modules=off", "--check-hash-based-pycs", "never", "x.py"],
            "python3 x.py",
        ),
        (["python3", "-", "hunter2"], "python3 -"),
        (["python3"], "python3"),
        (["python3", "-m"], "python3 -m"),
        (["python3", "-cprint(1)", "hunter2"], "python3 -c"),
        (["python3", "-uc", "print(1)", "hunter2"], "python3 -c"),
        (["python3", "-mhttp.server", "8000"], "python3 -m http.server"),
        (["python3", "-", "hunter2"], "python3 -"),
        (["python3", "-bW", "ignore", "train.py"], "python3 train.py"),
        (["python3", "-Xdev", "train.py"], "python3 train.py"),
        (["python3", "--check-hash-based-pycs", "always", "train.py"], "python3 train.py"),
        (["python3", "--", "train.py", "hunter2"], "python3 train.py"),
        (["python3", "-c", "evil\x1b[31m", "--api-key=sk-012345678901"], "python3 -c"),
        (["python3", "-m", "evil\x1b[31m"], "python3 -m evil\\x1b[31m"),
        (["python3", "me@example.com.py"], "python3 [email]"),
        (["python3", "x" * 10_000], "python3 " + "x" * (MAX_CHARS - 9) + "…"),
        (["trainer: rank 3"], "python3"),
    ],
)
def test_python_is_named_by_what_it_runs(line: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes("\0".join([*line, ""]).encode())
    assert named_by_script(7, "python3", tmp_path) == expected
    assert named_by_script(7, "hog-a-lot", tmp_path) == "hog-a-lot"


def test_python_that_is_gone_is_python(tmp_path: Path) -> None:
    assert named_by_script(7, "python3", tmp_path) == "python3"

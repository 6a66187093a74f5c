"""What is shown of a stranger's command line."""

from __future__ import annotations

import pytest

from dsagent.agent.command_names import MAX_CHARS, command_name, shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/python3", "/home/bob/train.py", "--lr", "1"], "python3 train.py --lr 1"),
        (["python", "-m", "torch.distributed.run"], "python -m torch.distributed.run"),
        (["python", "x.py", "--api-key", "sk-0123456789abcdef"], "python x.py --api-key [secret]"),
        (["a\x1b[31m", "b\nc", "\u202e"], "a\\x1b[31m b c \\u202e"),
        ([], ""),
    ],
)
def test_short_masked_and_without_control_characters(words: list[str], expected: str) -> None:
    assert shown(words) == expected


def test_bounded() -> None:
    assert len(shown(["x" * 200_000])) == MAX_CHARS
    assert len(shown(["x"] * 200_000)) == MAX_CHARS


def test_of_a_process_that_is_gone() -> None:
    assert command_name(2**22 + 7) == ""

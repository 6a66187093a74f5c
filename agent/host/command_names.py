"""What a process is called where its own name says too little: `python train.py`, not `python`.

A command line is a stranger's text, and may hold secrets: it is cut, masked and made safe to show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC
from dsagent.agent.masking import mask, mask_words

MAX_CHARS = 60
MAX_READ_BYTES = 4096
_PYTHON = re.compile(r"python[0-9.]{0,6}")
_LONG_WITH_VALUE = ("--check-hash-based-pycs",)
_PATH = re.compile(r"[\w.+@~/-]+")
_SHORTENED = 3  # the program, an option or the script, the script


def command_name(pid: int, proc: Path = PROC, max_chars: int = MAX_CHARS) -> str:
    """Its command line, shown; empty where it cannot be read."""
    return shown(procfs.command_line(pid, proc), max_chars)


def shown(words: Sequence[str], max_chars: int = MAX_CHARS) -> str:
    """Paths at the beginning by their last part: where a program lies says less than its
    arguments. What is masked is masked before: the last part of a secret is none to be seen."""
    safe = mask_words(words)
    first = [
        word.rsplit("/", 1)[-1] if _PATH.fullmatch(word) else word for word in safe[:_SHORTENED]
    ]
    text = mask(" ".join([*first, *safe[_SHORTENED:]]))  # some are told by the word before
    return procfs.escape(" ".join(text.split()), max_chars)


def named_by_script(pid: int, comm: str, proc: Path = PROC) -> str:
    """`python train.py` of a process that is called `python`; `comm` of any other, or where there
    is no more to be said. Without the script's arguments: these make no names to add up by."""
    if _PYTHON.fullmatch(comm) is None:
        return comm
    try:
        with open(proc / str(pid) / "cmdline", "rb", buffering=0) as file:
            words = file.read(MAX_READ_BYTES).decode("utf-8", "replace").split("\0")
    except OSError:  # it has ended, or is not ours to look into
        return comm
    if _PYTHON.fullmatch(words[0].rsplit("/", 1)[-1]) is None:
        return comm  # another program by now, or a title that it gave itself
    return shown([comm, *_script(words[1:])])


def _script(words: Sequence[str]) -> list[str]:
    """What Python is told to run, after its own options; nothing that comes behind it, nor code
    that stands on the command line."""
    rest = iter(words)
    for word in rest:
        if word == "-" or not word.startswith("-"):
            return [word] if word else []
        if word.startswith("--"):
            if word in _LONG_WITH_VALUE:
                next(rest, "")
            continue
        letter, value = _last_option(word)
        if letter == "c":
            return ["-c"]
        if letter == "m":
            return ["-m", value or next(rest, "")]
        if letter in ("X", "W") and not value:
            next(rest, "")
    return []


def _last_option(word: str) -> tuple[str, str]:
    """Of options in one word, the first that takes a value, and as much of that as stands there;
    of none that does, empty texts."""
    for at, letter in enumerate(word[1:], 1):
        if letter in "cmXW":
            return letter, word[at + 1 :]
    return "", ""

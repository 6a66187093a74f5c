"""What a process is called where its own name says too little: `python train.py`, not `python`.

A command line is a stranger's text, and may hold secrets: it is cut, masked and made safe to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsagent.agent import procfs
from dsagent.agent.masking import mask
from dsagent.agent.procfs import PROC

MAX_CHARS = 60
_SHORTENED = 3  # the program, an option or the script, the script


def command_name(pid: int, proc: Path = PROC, max_chars: int = MAX_CHARS) -> str:
    """Its command line, shown; empty where it cannot be read."""
    return shown(procfs.command_line(pid, proc), max_chars)


def shown(words: Sequence[str], max_chars: int = MAX_CHARS) -> str:
    """Paths at the beginning by their last part: where a program lies says less than its
    arguments."""
    first = [word.rsplit("/", 1)[-1] for word in words[:_SHORTENED]]
    text = " ".join([*first, *words[_SHORTENED:]])
    return procfs.escape(mask(" ".join(text.split())), max_chars)

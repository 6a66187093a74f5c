"""Child processes that never outlive us."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO

from dsagent.agent.errors import FINDINGS, USAGE, DsagentError

STOP_DEADLINE_S = 5.0

# Asks the kernel for SIGKILL at the parent's end (1 is PR_SET_PDEATHSIG), which exec keeps;
# run before the module proper, since what runs between fork and exec is unsafe beside threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_us(argv: Sequence[str]) -> list[str]:
    """The command, with a path as its first word, so that it is killed when the thread that
    starts it ends, however it ends."""
    return [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]


class Child:
    """`python -m MODULE …`; ended when the block is left, killed if that takes too long, and
    killed by the kernel should we be."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            dying_with_us([sys.executable, "-m", module, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Not in our foreground group: Ctrl-C is for us, who then end it in order.
            process_group=0,
        )
        self.pid = self._process.pid
        self.output: deque[str] = deque(maxlen=100)
        self.complaints: deque[str] = deque(maxlen=100)
        self._changed = threading.Condition()
        self._readers = [
            self._reader(self._process.stdout, self.output),
            self._reader(self._process.stderr, self.complaints),
        ]

    def _reader(self, stream: IO[str] | None, lines: deque[str]) -> threading.Thread:
        assert stream is not None
        thread = threading.Thread(target=self._read, args=(stream, lines), daemon=True)
        thread.start()
        return thread

    def _read(self, stream: IO[str], lines: deque[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n")[:500])
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first line on stderr that matches. Raises DsagentError: it ended (exit 2 where it
        says that it was asked for what is not there), or is too slow."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for line in self.complaints:
                    if found := re.search(pattern, line):
                        return found
                if self._process.poll() is not None:
                    last = next(reversed(self.complaints), f"code {self._process.returncode}")
                    code = USAGE if self._process.returncode == USAGE else FINDINGS
                    raise DsagentError(f"the engine did not start: {last}", exit_code=code)
                if time.monotonic() > deadline_s:
                    raise DsagentError(
                        f"the engine was not ready after {timeout_s:.0f} s", exit_code=FINDINGS
                    )
                self._changed.wait(0.2)

    def on_exit(self, call: Callable[[], None]) -> None:
        """Calls back, in a thread of its own, once it has ended and its output is read."""

        def wait() -> None:
            self._process.wait()
            for reader in self._readers:
                reader.join()
            call()

        threading.Thread(target=wait, daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

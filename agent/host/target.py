"""From any process of a server to the process tree to watch.

The target is the highest ancestor that belongs to the same engine, with all
its descendants. A process belongs to an engine if it holds one of its step
rings; a launcher without a ring is followed down to the one engine below it.
A vLLM server is one target: API servers, engines and workers each have rings
of their own, and what vLLM starts it names `VLLM::…`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError
from dsagent.agent.facts import Target
from dsagent.agent.host import privileges, procfs
from dsagent.agent.host.clock import check_time_namespace
from dsagent.agent.host.privileges import Capability
from dsagent.agent.host.procfs import PROC, ProcessGone

START_S = 60.0  # an engine that has no ring by then never will, or says why itself
START_TICK_S = 0.1
ENGINE_MODULE = "dsagent.instrumentation.reference"
VLLM_MODULE = "vllm.entrypoints.openai.api_server"
VLLM_TITLE = "VLLM::"  # of its children: their parent is its, too
MOST_GENERATIONS = 16
MAX_COMMAND_BYTES = 16 << 10  # of a command line: what is run stands at its beginning


class NothingThere(DsagentError):  # noqa: N818 - what was found, not what went wrong
    """No process of that pid, or none that serves."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=CANNOT_ATTACH)


class NotAnEngine(NothingThere):
    """There is no step ring to be read, so far."""


@dataclass(frozen=True, slots=True)
class Rings:
    """What the rings of one process say: the engines they belong to, and why rings were refused."""

    engine_ids: frozenset[int] = frozenset()
    refused: tuple[str, ...] = ()
    vllm: bool = False

    @property
    def engine(self) -> str:
        return "vllm" if self.vllm else "reference"

    def same_server(self, other: Rings) -> bool:
        """Whether two processes, one above the other, belong together."""
        return bool(self.engine_ids & other.engine_ids) or (self.vllm and other.vllm)


def probe_rings(pid: int) -> Rings:
    """Opens every ring of the process and closes it again. Raises PermissionError, ProcessGone."""
    from dsagent.instrumentation.ring import RingReader, RingRejected, find_rings

    engine_ids = set()
    refused = []
    vllm = False
    try:
        candidates = find_rings(pid)
    except FileNotFoundError as error:
        raise ProcessGone(str(pid)) from error
    for candidate in candidates:
        try:
            reader = RingReader.open(candidate)
        except RingRejected as rejection:
            refused.append(str(rejection))
            continue
        engine_ids.add(reader.header.engine_id)
        vllm |= reader.header.vllm
        reader.close()
    return Rings(frozenset(engine_ids), tuple(refused), vllm)


def resolve(
    pid: int, *, proc: Path = PROC, rings_of: Callable[[int], Rings] = probe_rings
) -> Target:
    """The target that `pid`, a process or a thread, belongs to. Raises DsagentError with exit
    code 3 and the reason."""
    pid = procfs.process_of(pid, proc)
    stat = _stat(pid, proc)
    _check_permitted(pid, proc)
    if pid == os.getpid():
        raise _cannot("that is dsagent itself; give the pid of a server")
    parent_of = procfs.parents(proc)
    below = procfs.descendants(pid, parent_of)
    above = procfs.ancestors(pid, parent_of)
    rings = _probe(pid, rings_of)
    if rings.engine_ids:
        root = _highest(pid, rings, above, rings_of)
    elif (followed := _engine_below(pid, stat.comm, below, parent_of, rings_of, proc)) is not None:
        root, rings = followed
    elif (helped := _engine_above(above, rings_of)) is not None:
        nearest, rings = helped
        root = _highest(nearest, rings, above[above.index(nearest) + 1 :], rings_of)
    else:
        raise _not_an_engine(pid, stat.comm, (pid, *below), rings_of)
    if rings.vllm:
        root = vllm_root(root, proc)
    target = describe(root, proc, engine=rings.engine)
    check_time_namespace(root, proc)
    if root != pid:
        _check_same(pid, stat.start_ticks, proc)
    return target


def resolve_starting(pid: int, say: Callable[[str], None], proc: Path = PROC) -> Target:
    """`resolve`, but waits for an engine that is just starting: until its rings are there, it
    ends, or it is a minute old. `say` is told that it waits."""
    told = False
    while True:
        try:
            return resolve(pid, proc=proc)
        except NotAnEngine:
            if not is_starting(pid, proc):
                raise
        if not told:
            say(f"waiting for process {pid} to become an engine")
            told = True
        time.sleep(START_TICK_S)


def is_starting(pid: int, proc: Path = PROC, below: tuple[int, ...] | None = None) -> bool:
    """Whether one of its tree, younger than a minute, is on its way to be the bundled engine, or
    vLLM: there it takes that long until it is known whether the plug-in is there. `below`: its
    descendants, where they are known."""
    if below is None:
        below = procfs.descendants(pid, procfs.parents(proc))
    for each in (pid, *below):
        try:
            stat = procfs.read_stat(each, proc)
        except (ProcessGone, PermissionError):
            continue
        if stat.state in "ZXx" or procfs.age_s(stat.start_ticks) >= START_S:
            continue
        words = procfs.command_line(each, proc, MAX_COMMAND_BYTES)
        serves = any(
            word in (ENGINE_MODULE, VLLM_MODULE)
            or (word.rsplit("/", 1)[-1], after) in (("dsagent", "serve"), ("vllm", "serve"))
            for word, after in itertools.zip_longest(words, words[1:])
        )
        if serves:
            return True
    return False


def describe(pid: int, proc: Path = PROC, *, engine: str = "reference") -> Target:
    """The Target whose root is `pid`, as it is now. Raises DsagentError when it has ended."""
    stat = _stat(pid, proc)
    try:
        namespace = os.stat(proc / str(pid) / "ns" / "pid").st_ino
    except FileNotFoundError as error:
        raise _cannot(f"process {pid} ended while attaching") from error
    except PermissionError as error:
        raise _not_permitted(pid, proc) from error
    return Target(
        pid=pid,
        start_ticks=stat.start_ticks,
        pid_namespace=namespace,
        comm=stat.comm,
        children=procfs.descendants(pid, procfs.parents(proc)),
        engine=engine,
        service_name=engine,
        container_id=procfs.container_id(pid, proc),
    )


def check_alive(target: Target, proc: Path = PROC) -> None:
    """Raises DsagentError when the target has ended, or its pid belongs to another process now."""
    _check_same(target.pid, target.start_ticks, proc)


def _check_same(pid: int, start_ticks: int, proc: Path) -> None:
    try:
        stat = procfs.read_stat(pid, proc)
    except ProcessGone as error:
        raise _cannot(f"process {pid} ended while attaching") from error
    if stat.start_ticks != start_ticks:
        raise _cannot(f"process {pid} ended while attaching, and its pid was reused; try again")
    if stat.state in "ZXx":
        raise _cannot(f"process {pid} ended while attaching")


def _stat(pid: int, proc: Path) -> procfs.ProcessStat:
    try:
        stat = procfs.read_stat(pid, proc)
    except ProcessGone as error:
        raise NothingThere(f"cannot attach: there is no process {pid}") from error
    except PermissionError as error:
        raise _not_permitted(pid, proc) from error
    if stat.state in "ZXx":
        raise _cannot(f"process {pid} ({stat.comm}) has ended and waits for its parent (a zombie)")
    return stat


def _check_permitted(pid: int, proc: Path) -> None:
    try:
        os.listdir(proc / str(pid) / "fdinfo")  # open to who may trace it, as fd is not
        os.readlink(proc / str(pid) / "ns" / "pid")
    except PermissionError as error:
        raise _not_permitted(pid, proc) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise _cannot(f"process {pid} ended while attaching") from error


def _probe(pid: int, rings_of: Callable[[int], Rings]) -> Rings:
    """Of a process near the one asked for: one that is gone or not ours has no rings for us."""
    try:
        return rings_of(pid)
    except (PermissionError, ProcessGone):
        return Rings()


def _highest(
    pid: int, rings: Rings, above: tuple[int, ...], rings_of: Callable[[int], Rings]
) -> int:
    highest = pid
    for ancestor in above:
        if _probe(ancestor, rings_of).same_server(rings):
            highest = ancestor
    return highest


def vllm_root(pid: int, proc: Path = PROC) -> int:
    """The process that started the vLLM server which `pid` belongs to; `pid` where it was started
    by none of vLLM's."""
    for _ in range(MOST_GENERATIONS):
        try:
            stat = procfs.read_stat(pid, proc)
        except (ProcessGone, PermissionError):
            break
        if not stat.comm.startswith(VLLM_TITLE) or stat.ppid < 1:
            break
        if stat.ppid == 1 and not _is_first_vllm(pid, proc):
            break
        pid = stat.ppid
    return pid


def _is_first_vllm(pid: int, proc: Path) -> bool:
    """Whether vLLM is the first process of its container, and so the parent of what it started;
    else what the first process is the parent of is an orphan."""
    try:
        own, first = (os.stat(proc / str(each) / "exe") for each in (pid, 1))
    except OSError:
        return False
    is_same_program = (own.st_dev, own.st_ino) == (first.st_dev, first.st_ino)
    return is_same_program and any("vllm" in word for word in procfs.command_line(1, proc))


def _engine_below(
    pid: int,
    comm: str,
    below: tuple[int, ...],
    parent_of: dict[int, int],
    rings_of: Callable[[int], Rings],
    proc: Path,
) -> tuple[int, Rings] | None:
    """The topmost process of the one engine below a launcher; None where there is none."""
    roots: dict[int, Rings] = {}
    for descendant in below:  # nearest first: a parent comes before its children
        rings = _probe(descendant, rings_of)
        root = vllm_root(descendant, proc) if rings.vllm else descendant
        above = {root, *procfs.ancestors(descendant, parent_of)}
        if rings.engine_ids and not any(
            rings.engine_ids & seen.engine_ids or (rings.vllm and seen.vllm and there in above)
            for there, seen in roots.items()
        ):
            roots[root] = rings
    if len(roots) > 1:
        pids = ", ".join(str(root) for root in sorted(roots))
        raise _cannot(f"process {pid} ({comm}) launched several engines; give one of: {pids}")
    return next(iter(roots.items()), None)


def _engine_above(
    above: tuple[int, ...], rings_of: Callable[[int], Rings]
) -> tuple[int, Rings] | None:
    for ancestor in above:
        rings = _probe(ancestor, rings_of)
        if rings.engine_ids:
            return ancestor, rings
    return None


def _not_an_engine(
    pid: int, comm: str, pids: tuple[int, ...], rings_of: Callable[[int], Rings]
) -> NotAnEngine:
    refused = [reason for each in pids for reason in _probe(each, rings_of).refused]
    message = (
        f"the step ring of process {pid} ({comm}) is refused: {procfs.escape(refused[0])}"
        if refused
        else f"process {pid} ({comm}) is not an engine: neither it nor a process below it has a "
        "step ring; give the pid of a server started with `dsagent serve`, of vLLM with dsagent "
        "installed beside it (without: --instrument inject), or of another that listens on TCP"
    )
    return NotAnEngine(f"cannot attach: {message}")


def _not_permitted(pid: int, proc: Path) -> DsagentError:
    try:
        uid = os.stat(proc / str(pid)).st_uid
    except OSError:
        return _cannot(f"process {pid} ended while attaching")
    owner = privileges.user_name(uid)
    message = f"not permitted to look into process {pid}, which belongs to {owner}"
    if Capability.CAP_SYS_PTRACE in privileges.effective_capabilities():
        return _cannot(
            f"{message}, although CAP_SYS_PTRACE is in effect: it is outside the reach of this "
            "container or user namespace, or a security module forbids it"
        )
    if os.geteuid() == 0:
        return _cannot(f"{message}; dsagent needs CAP_SYS_PTRACE for that")
    others = "" if uid in (0, os.geteuid()) else f" or as {owner}"
    return _cannot(f"{message}; run dsagent as root{others}")


def _cannot(message: str) -> DsagentError:
    return DsagentError(f"cannot attach: {message}", exit_code=CANNOT_ATTACH)

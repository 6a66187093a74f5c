"""From any process of a server to the process tree to watch.

The target is the highest ancestor that belongs to the same engine, with all
its descendants. A process belongs to an engine if it holds one of its step
rings; a launcher without a ring is followed down to the one engine below it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent import privileges, procfs
from dsagent.agent.clock import check_time_namespace
from dsagent.agent.errors import CANNOT_ATTACH, DsagentError
from dsagent.agent.facts import Target
from dsagent.agent.privileges import Capability
from dsagent.agent.procfs import PROC, ProcessGone

START_S = 60.0  # an engine that has no ring by then never will, or says why itself
START_TICK_S = 0.1
ENGINE_MODULE = "dsagent.instrumentation.reference"


class NotAnEngine(DsagentError):  # noqa: N818 - what was found, not what went wrong
    """There is no step ring to be read, so far."""


@dataclass(frozen=True, slots=True)
class Rings:
    """What the rings of one process say: the engines they belong to, and why rings were refused."""

    engine_ids: frozenset[int] = frozenset()
    refused: tuple[str, ...] = ()


def probe_rings(pid: int) -> Rings:
    """Opens every ring of the process and closes it again. Raises PermissionError, ProcessGone."""
    from dsagent.instrumentation.ring import RingReader, RingRejected, find_rings

    engine_ids = set()
    refused = []
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
        reader.close()
    return Rings(frozenset(engine_ids), tuple(refused))


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
        root = _highest(pid, rings.engine_ids, above, rings_of)
    elif (followed := _engine_below(pid, stat.comm, below, parent_of, rings_of)) is not None:
        root = followed
    elif (helped := _engine_above(above, rings_of)) is not None:
        root = _highest(helped[0], helped[1], above[above.index(helped[0]) + 1 :], rings_of)
    else:
        raise _not_an_engine(pid, stat.comm, (pid, *below), rings_of)
    target = describe(root, proc)
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


def is_starting(pid: int, proc: Path = PROC) -> bool:
    """Whether one of its tree, younger than a minute, is on its way to be the bundled engine."""
    for each in (pid, *procfs.descendants(pid, procfs.parents(proc))):
        try:
            stat = procfs.read_stat(each, proc)
        except (ProcessGone, PermissionError):
            continue
        words = procfs.command_line(each, proc)
        serves = any(
            word == ENGINE_MODULE or (word.rsplit("/", 1)[-1], after) == ("dsagent", "serve")
            for word, after in itertools.zip_longest(words, words[1:])
        )
        if serves and stat.state not in "ZXx" and procfs.age_s(stat.start_ticks) < START_S:
            return True
    return False


def describe(pid: int, proc: Path = PROC) -> Target:
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
        engine="reference",
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
        raise _cannot(f"there is no process {pid}") from error
    except PermissionError as error:
        raise _not_permitted(pid, proc) from error
    if stat.state in "ZXx":
        raise _cannot(f"process {pid} ({stat.comm}) has ended and waits for its parent (a zombie)")
    return stat


def _check_permitted(pid: int, proc: Path) -> None:
    try:
        os.listdir(proc / str(pid) / "fd")
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
    pid: int,
    engine_ids: frozenset[int],
    above: tuple[int, ...],
    rings_of: Callable[[int], Rings],
) -> int:
    highest = pid
    for ancestor in above:
        if _probe(ancestor, rings_of).engine_ids & engine_ids:
            highest = ancestor
    return highest


def _engine_below(
    pid: int,
    comm: str,
    below: tuple[int, ...],
    parent_of: Mapping[int, int],
    rings_of: Callable[[int], Rings],
) -> int | None:
    """The topmost process of the one engine below a launcher; None where there is none."""
    roots: dict[int, frozenset[int]] = {}
    for descendant in below:  # nearest first: a parent comes before its children
        engine_ids = _probe(descendant, rings_of).engine_ids
        if engine_ids and not any(engine_ids & seen for seen in roots.values()):
            roots[descendant] = engine_ids
    if len(roots) > 1:
        pids = ", ".join(str(root) for root in sorted(roots))
        raise _cannot(f"process {pid} ({comm}) launched several engines; give one of: {pids}")
    return next(iter(roots), None)


def _engine_above(
    above: tuple[int, ...], rings_of: Callable[[int], Rings]
) -> tuple[int, frozenset[int]] | None:
    for ancestor in above:
        engine_ids = _probe(ancestor, rings_of).engine_ids
        if engine_ids:
            return ancestor, engine_ids
    return None


def _not_an_engine(
    pid: int, comm: str, pids: tuple[int, ...], rings_of: Callable[[int], Rings]
) -> NotAnEngine:
    refused = [reason for each in pids for reason in _probe(each, rings_of).refused]
    message = (
        f"the step ring of process {pid} ({comm}) is refused: {procfs.escape(refused[0])}"
        if refused
        else f"process {pid} ({comm}) is not an engine: neither it nor a process below it has a "
        "step ring; give the pid of a server started with `dsagent serve`"
    )
    return NotAnEngine(f"cannot attach: {message}", exit_code=CANNOT_ATTACH)


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

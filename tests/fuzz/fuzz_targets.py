"""What reads bytes that others have made, each as one function of bytes that may not raise.

`run` lets through what the function says it raises, and nothing else: whatever comes out of it is
a finding. `seeds` are honest inputs, from which both hypothesis and the coverage-guided fuzzer
start. Where an input would be refused for its first bytes, the fuzzed bytes are *patches* of an
honest one (`patched`).
"""

from __future__ import annotations

import ctypes
import gzip
import math
import os
import random
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from functools import cache
from pathlib import Path
from typing import Any

from made import account, batch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from dsagent.agent import settings
from dsagent.agent.again import attribute_again
from dsagent.agent.attribution.normal import from_json
from dsagent.agent.errors import DsagentError
from dsagent.agent.files import read_named
from dsagent.agent.fleet.manifest import BadManifest, parse_manifest
from dsagent.agent.fleet.policy import load_policy
from dsagent.agent.host import procfs, sockets
from dsagent.agent.inject import memory
from dsagent.agent.inject.elf import Image, NotElf
from dsagent.agent.listening import control
from dsagent.agent.listening.admission import Guard, ListenOptions
from dsagent.agent.listening.question import parse_question
from dsagent.agent.metrics import exposition, served
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.sidecar.reader import SettingsReader
from dsagent.agent.sinks.delivery_ledger import DeliveryLedger
from dsagent.agent.sinks.disk_queue import DiskQueue
from dsagent.agent.sinks.otlp_grpc import _retry_after_s
from dsagent.agent.sinks.reader import read_accounts
from dsagent.agent.sinks.recording import RecordingSink
from dsagent.agent.slo import load_slo
from dsagent.agent.sources import proc as proc_source
from dsagent.agent.sources.otlp_receiver.http_head import RefusedError, parse_head
from dsagent.agent.sources.otlp_receiver.inbox import Inbox, gunzip
from dsagent.agent.sources.otlp_receiver.wire import BadBodyError
from dsagent.agent.sources.outside.elf import BadElf, Library
from dsagent.agent.sources.outside.http1 import Messages
from dsagent.agent.sources.outside.messages import parse_message
from dsagent.agent.sources.outside.reply import Reply
from dsagent.agent.sources.plausible import plausible
from dsagent.instrumentation.layout import HEADER_BYTES, RING_NAME, Role
from dsagent.instrumentation.records import Admission, Phase, RequestOpen, Share, Step
from dsagent.instrumentation.ring import (
    RingCandidate,
    RingReader,
    RingRejected,
    RingWriter,
    find_rings,
)
from dsagent.instrumentation.tally import Tally, What
from dsagent.instrumentation.wire import Malformed, Origin, decode, encode

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """`words`: what inputs of this kind are made of."""

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()


def patched(honest: bytes, patches: bytes) -> bytes:
    """`patches`: where (4 bytes, modulo the length), how many bytes (1), these bytes; and so on.
    A patch of no bytes cuts the rest off."""
    image = bytearray(honest)
    at = 0
    while at + 5 <= len(patches) and image:
        where, count = struct.unpack_from("<IB", patches, at)
        where %= len(image)
        at += 5
        if count == 0:
            del image[where:]
        image[where : where + count] = patches[at : at + count][: len(image) - where]
        at += count
    return bytes(image)


@cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="dsagent-fuzz-")
    _KEPT.append(made)  # removed when the process ends
    return Path(made.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _file(name: str, content: bytes) -> Path:
    path = _folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Records and rings


def _step(step_id: int) -> Step:
    share = Share(step_id << 12 | 1, Phase.DECODE, 1, 0, step_id, 1, False)
    return Step(
        engine_id=1,
        step_id=step_id,
        pid=os.getpid(),
        tid=os.getpid(),
        start_ns=step_id * 1000,
        end_ns=step_id * 1000 + 900,
        schedule_ns=100,
        prepare_ns=50,
        forward_ns=600,
        sample_ns=100,
        output_ns=50,
        prefill_tokens=0,
        decode_tokens=1,
        waiting=0,
        running=1,
        preempted=0,
        kv_blocks_used=2,
        kv_blocks_total=1024,
        admission=Admission.NO_PLACE,
        graph=False,
        shares=(share,),
    )


@cache
def _ring_image() -> bytes:
    ring = RingWriter(role=Role.SCHEDULER, engine_id=1, capacity_bytes=128 << 10)
    try:
        for step_id in range(1, 40):
            ring.write(_step(step_id))
        (candidate,) = [each for each in find_rings(os.getpid()) if each.inode == ring.inode]
        with open(f"/proc/self/fd/{candidate.fd}", "rb") as file:
            return file.read()
    finally:
        ring.close()


@contextmanager
def _sealed(content: bytes) -> Iterator[RingCandidate]:
    fd = os.memfd_create(RING_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, content, 0)
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
        yield RingCandidate(os.getpid(), fd, os.fstat(fd).st_ino)
    finally:
        os.close(fd)


def run_ring(data: bytes) -> None:
    """The first byte says where the patches lie: in the header, or in the records."""
    honest = _ring_image()
    in_header = bool(data[:1] and data[0] & 1)
    if in_header:
        image = patched(honest[:HEADER_BYTES], data[1:]).ljust(HEADER_BYTES, b"\0")
        image += honest[HEADER_BYTES:]
    else:
        image = honest[:HEADER_BYTES] + patched(
            honest[HEADER_BYTES : HEADER_BYTES + 8192], data[1:]
        )
    with _sealed(image.ljust(len(honest), b"\0")) as candidate, suppress(RingRejected):
        reader = RingReader.open(candidate)
        try:
            for _ in range(4):
                for record in reader.read():
                    plausible(record, time.monotonic_ns())
            reader.running()
            reader.health()
            counters = reader.counters
            assert min(counters.read, counters.lapped, counters.torn, counters.rejected) >= 0
            assert counters.uncounted_loss >= 0
        finally:
            reader.close()


def run_record(data: bytes) -> None:
    """The first byte is the kind."""
    with suppress(Malformed):
        record = decode(data[0] if data else 0, data[1:], Origin(1, 2, 3, self_exported=False))
        plausible(record, 1 << 40)


def record_seeds() -> list[bytes]:
    opened = RequestOpen(7, "cmpl-1", 1 << 100, 5, None, True, 9, 1, 1)
    tally = Tally(1, 1, What.EXPERT_TOKENS, 0, 0, 5, 9, "moe", (7, 8))
    made = [encode(_step(3)), encode(account("r").record), encode(opened), encode(tally)]
    return [bytes((kind,)) + payload for kind, payload in made]


# /proc


def run_procfs(data: bytes) -> None:
    """One file's content for all files of a process: each parser gets its own seeds."""
    proc = _folder() / "proc"
    for name in (
        *("7/stat", "7/status", "7/cgroup", "7/smaps_rollup", "7/cmdline", "7/maps", "7/io"),
        *("7/task/7/status", "stat", "7/net/tcp", "7/net/tcp6", "net/unix"),
    ):
        _file(f"proc/{name}", data)
    (proc / "7/fd").mkdir(exist_ok=True)
    with suppress(FileExistsError):
        os.symlink("socket:[77]", proc / "7/fd/3")
    for read in (
        lambda: procfs.read_stat(7, proc),
        lambda: procfs.context_switches(7, 7, proc),
        lambda: proc_source.read_process(7, proc),
        lambda: proc_source.read_throttled_s(7, proc, _folder()),
        lambda: proc_source.read_machine_cpu(proc),
        lambda: procfs.parents(proc),
        lambda: list(memory.mappings(7, proc)),
        lambda: memory.in_status(7, "Uid", proc),
        lambda: procfs.process_of(7, proc),
        lambda: procfs.container_id(7, proc),
        lambda: procfs.pss_bytes(7, proc),
        lambda: procfs.command_line(7, proc),
        lambda: sockets.listening(7, proc),
        lambda: control.running(proc),
    ):
        with suppress(procfs.ProcessGone):
            read()


def procfs_seeds() -> list[bytes]:
    status = (
        b"Name:\tpython\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t7\nPPid:\t1\n"
        b"Uid:\t0\t0\t0\t0\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t6\n"
    )
    cgroup = b"5:cpu,cpuacct:/kubepods/pod1/" + b"0123456789abcdef" * 4 + b"\n0::/../other\n"
    unix = (
        b"Num       RefCount Protocol Flags    Type St Inode Path\n"
        b"0000000000000000: 00000002 00000000 00010000 0001 01 77 @dsagent/7\n"
    )
    machine = b"cpu  10 0 20 300 4 0 6 7 0 0\ncpu0 5 0 10 150 2 0 3 3 0 0\n"
    tcp = (
        b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        b"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0 0 77 1\n"
    )
    maps = b"7f00-7f01 r-xp 00000000 00:1f 77 /usr/lib/x.so\n"
    stat = b"7 (a) b) S 1 7 7 0 -1 4 1 0 2 0 3 4 0 0 20 0 1 0 99 1000 10 18446744073709551615\n"
    small = (b"python\0-m\0serve\0", b"read_bytes: 5\nwrite_bytes: 6\n", b"Pss:   12 kB\n")
    return [status, cgroup, unix, machine, tcp, maps, stat, *small]


# HTTP, seen from outside


def run_http1(data: bytes) -> None:
    """As many pieces as the first byte says, once whole and once with bytes that were not seen."""
    pieces = 1 + (data[0] % 8 if data else 0)
    text = data[1:]
    size = max(1, len(text) // pieces)
    for side in ("request", "response"):
        for hidden in (0, 1, 1 << 33):
            reader = Messages(side)
            for at in range(0, len(text), size):
                piece = text[at : at + size]
                list(reader.feed(piece, len(piece) + hidden, piece[-8:] if hidden else b""))
            list(reader.close())
    parse_message(data)
    for events in (False, True):
        reply = Reply(events=events)
        for at in range(0, len(text), size):
            reply.feed(text[at : at + size], size + 3)
        reply.close()
        for said in (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens):
            assert said is None or said >= 0
        assert reply.tokens >= 0


HTTP_WORDS = (
    *(b"\r\n", b"\r\n\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: ", b"0\r\n\r\n"),
    *(b"HTTP/1.1 200 OK\r\n", b"POST /v1/completions HTTP/1.1\r\n", b"data: ", b"[DONE]\n\n"),
    *(b"ffffffffffffffff\r\n", b"99999999999999999999", b'"usage":{"completion_tokens":'),
)


def http1_seeds() -> list[bytes]:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    post = b'POST /v1/chat HTTP/1.1\r\nContent-Length: 11\r\n\r\n{"model":1}'
    events = (
        b'data: {"id":"x","model":"m","choices":[{"text":"a"}]}\n\n'
        b'data: {"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
    )
    return [b"\0" + each for each in (chunked, post, events, post + post)]


# OTLP


def run_otlp(data: bytes) -> None:
    inbox = Inbox(passes_on=True)
    inbox.put(data)
    inbox.take()
    with suppress(BadBodyError):
        inbox.put(gunzip(data))
    for text in (data, b"POST /v1/traces HTTP/1.1\r\n" + data):
        with suppress(RefusedError):
            assert 0 <= parse_head(text, 1000).length <= 1000


def otlp_seeds() -> list[bytes]:
    named = KeyValue(key="gen_ai.request.id", value=AnyValue(string_value="r"))
    figure = KeyValue(key="gen_ai.latency.e2e", value=AnyValue(double_value=1.5))
    span = Span(
        trace_id=b"\1" * 16,
        span_id=b"\2" * 8,
        kind=Span.SPAN_KIND_SERVER,
        name="llm_request",
        start_time_unix_nano=5,
        end_time_unix_nano=9,
        attributes=[named, figure],
    )
    scopes = [ScopeSpans(spans=[span, Span(name="other")])]
    body = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=scopes)])
    plain: bytes = body.SerializeToString()
    head = b"Content-Type: application/x-protobuf\r\nContent-Length: 5\r\nAuthorization: Bearer x"
    return [plain, gzip.compress(plain, mtime=0), head]


# Files that people name


def run_slo(data: bytes) -> None:
    with suppress(DsagentError):
        load_slo(_file("slo.yaml", data))


def slo_seeds() -> list[bytes]:
    return [
        (ROOT / "dashboards/slo.yaml").read_bytes()[:4096],
        b"slo:\n  - model: '*'\n    ttft_ms: 100\n    objective: 99.9%\n    by: [tenant]\n",
        b"prompt_classes: [10, 100]\nwebhook: http://h/\nslo:\n  - model: m\n    e2e_ms: 5\n",
        b"cache:\n  - name: x\n    command: [a]\nwindows_divided_by: 60\nslo: [{model: m}]\n",
    ]


def run_settings(data: bytes) -> None:
    """Both settings and a file of tokens."""
    path = _file("dsagent.toml", data)
    path.chmod(0o600)
    with suppress(DsagentError):
        loaded = settings.load(str(path), {"prometheus", "max_overhead", "slo", "duration"})
        SettingsReader(
            settings.File(str(path), frozenset(loaded)), lambda _values: SidecarOptions()
        ).read()
        for value in loaded.values():
            with suppress(DsagentError):
                settings.listen_address(str(value))
            with suppress(DsagentError):
                settings.parse_percent(str(value))
    with suppress(DsagentError):
        assert not Guard(ListenOptions(path)).admits(data[:300])


def settings_seeds() -> list[bytes]:
    return [
        b'prometheus = "127.0.0.1:9464"\nmax_overhead = "1%"\n',
        b"duration = 1e9\nslo = '''a'''\n[sidecar]\nallow_inject = true\n",
        b"0123456789abcdef\nfedcba9876543210\n",
    ]


def run_fleet(data: bytes) -> None:
    """A policy and a manifest, as they lie in a bucket that others write to."""
    with suppress(DsagentError):
        load_policy(_file("policy.toml", data))
    with suppress(BadManifest):
        parse_manifest(MANIFEST, data)


MANIFEST = "rolled/hour=2026-11-29T21/pod=engine-0/1-00000001-00000002.json"


def fleet_seeds() -> list[bytes]:
    manifest = (
        b'{"format": "dsagent rolled batch", "schema_version": 1, "pod": "engine-0", '
        b'"hour": "2026-11-29T21", "segments": [[1, 2]], "masked": true, '
        b'"files": {"requests": {"rows": 1, "bytes": 2, "sha256": "' + b"0a" * 32 + b'"}}}'
    )
    return [b"[raw]\nkeep_days = 7\n[hourly]\nkeep_days = 90\n", manifest]


def run_answer(data: bytes) -> None:
    """What a back end sends beside its refusal over gRPC."""
    for key in ("google.rpc.retryinfo-bin", "grpc-status-details-bin"):
        delay_s = _retry_after_s([(key, data)])
        assert delay_s is None or delay_s >= 0.0


def run_normal(data: bytes) -> None:
    import json

    with suppress(ValueError, RecursionError):  # as whoever reads the file allows for
        from_json(json.loads(read_named(_file("normal.json", data))))


# What the agent itself has written once


@cache
def _recorded() -> Mapping[str, bytes]:
    folder = Path(tempfile.mkdtemp(prefix="dsagent-fuzz-recording-"))
    sink = RecordingSink(folder)
    sink.start()
    sink.take(batch(accounts=(account("a"), account("b", sampled=True)), steps=(_step(1),)))
    sink.stop(10.0)
    files = {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if each.is_file()}
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    return files


def run_recording(data: bytes) -> None:
    """The first byte says which file is patched."""
    files = _recorded()
    folder = _folder() / "recording"
    chosen = sorted(files)[data[0] % len(files) if data else 0]
    for name, content in files.items():
        _file(f"recording/{name}", patched(content, data[1:]) if name == chosen else content)
    with suppress(DsagentError):
        read_accounts(folder, tell=lambda _line: None)
    with suppress(DsagentError):
        list(attribute_again(folder, tell=lambda _line: None))


def run_disk_queue(data: bytes) -> None:
    from dsagent.agent.sinks.outbox import Body

    folder = _folder() / "queue"
    queue = DiskQueue(folder, 1 << 20, DeliveryLedger("otlp"))
    queue.open()
    queue.put(Body(b"honest" * 9, 1))
    queue.end()
    queue.close()
    for path in folder.iterdir():
        path.write_bytes(patched(path.read_bytes(), data))
    again = DiskQueue(folder, 1 << 20, DeliveryLedger("otlp"))
    again.open()
    again.end()
    try:
        while (taken := again.take()) is not None:
            again.settle(taken[0])
    finally:
        again.close()
        for path in folder.iterdir():
            path.unlink()


# What a client of the agent asks


def run_control(data: bytes) -> None:
    """One real connection to a real server, of the bytes as they come."""

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return asdict(parse_question(request))

    with selectors.DefaultSelector() as selector:
        pid = 1_000_000_000 + random.randrange(1 << 30)  # no process has it
        server = control.ControlServer(pid, selector, answer)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.settimeout(5.0)
            client.connect(f"\0dsagent/{pid}")
            with suppress(OSError):
                client.sendall(data[: 128 << 10])
                client.shutdown(socket.SHUT_WR)
            for _ in range(20):
                for key, mask in selector.select(0.0):
                    key.data(mask)
            server.expire(time.monotonic_ns() + 10**12)
            assert len(selector.get_map()) == 1, "a connection was left open"
        finally:
            client.close()
            server.close()


CONTROL_SEEDS = [
    b'{"op": "explain", "id": "req-1", "by": "ttft", "last_ns": 5}\n',
    b'{"op": "why", "last_ns": 600000000000}\n{"op": "status", "pid": 7}\n',
]


# What an engine says, and what it is made of


def run_exposition(data: bytes) -> None:
    found = served.quantities(exposition.parse(data.decode("utf-8", "replace"), served.NAMES))
    assert all(map(math.isfinite, found.values()))


@cache
def _library() -> bytes:
    """A small one that is surely there: libpython's own is large, the loader's will do."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = [line.split()[-1] for line in maps if ".so" in line]
    smallest = min(set(paths), key=os.path.getsize)
    return Path(smallest).read_bytes()


def run_elf(data: bytes) -> None:
    image = patched(_library(), data)
    with open(_file("library.so", image), "rb") as file, suppress(BadElf):
        library = Library(file.fileno())
        for name in ("PyInit__test", "malloc", "_init"):
            library.function(name)


@cache
def _mapped() -> tuple[int, bytes]:
    """Where the library that _library() chose lies in this very process's memory, and how: the
    loader has written addresses into it."""
    ctypes.CDLL(str(_file("honest.so", _library())))
    mine = [each for each in memory.mappings(os.getpid()) if each.path.endswith("honest.so")]
    base, end = mine[0].start, mine[-1].end
    image = bytearray(end - base)
    with memory.Memory(os.getpid()) as own:
        for each in mine:
            if each.permissions.startswith("r"):
                at = each.start - base
                image[at : at + each.end - each.start] = own.read(each.start, each.end - each.start)
    return base, bytes(image)


class _Memory:
    """Of a process whose only mapping is this image."""

    def __init__(self, base: int, image: bytes) -> None:
        self._base = base
        self._image = image

    def read(self, address: int, size_bytes: int) -> bytes:
        at = address - self._base
        if not 0 <= size_bytes <= memory.MAX_READ_BYTES or at < 0:
            raise memory.MemoryGone("out of bounds")
        found = self._image[at : at + size_bytes]
        if len(found) != size_bytes:
            raise memory.MemoryGone("nothing there")
        return found


def run_image(data: bytes) -> None:
    """Whose symbols are looked for before hooks are put in."""
    base, honest = _mapped()
    with suppress(NotElf, memory.MemoryGone):
        image = Image(_Memory(base, patched(honest, data)), base)  # type: ignore[arg-type]
        for name in ("PyInit__test", "malloc", "_init", "PyRun_SimpleString"):
            image.symbol(name)
        image.symbol_table(100_000)


def no_seeds() -> list[bytes]:
    return [b"", struct.pack("<IB", 40, 8) + b"\xff" * 8, struct.pack("<IB", 4, 0)]


def _numbered() -> list[bytes]:
    return [bytes((number,)) + seed for number in range(12) for seed in no_seeds()]


TARGETS = {
    each.name: each
    for each in (
        FuzzTarget("ring", run_ring, _numbered, (b"\xff" * 8, b"\0" * 8, b"\x80")),
        FuzzTarget("record", run_record, record_seeds, (b"\xff" * 8, b"\xff\xff", b"\x1b[31m")),
        FuzzTarget(
            "procfs", run_procfs, procfs_seeds, (b"\n", b" ", b")", b"18446744073709551616")
        ),
        FuzzTarget("http1", run_http1, http1_seeds, HTTP_WORDS),
        FuzzTarget("otlp", run_otlp, otlp_seeds, (b"\xff\xff\xff\xff\x0f", b"\x0a", b"\x1f\x8b")),
        FuzzTarget("slo", run_slo, slo_seeds, (b"model: ", b"\n  - ", b"&a ", b"*a", b"[", b"{")),
        FuzzTarget("settings", run_settings, settings_seeds, (b" = ", b"\n", b"[", b"'", b'"')),
        FuzzTarget("fleet", run_fleet, fleet_seeds, (b'"files": {', b"[[", b"null", b"keep_days")),
        FuzzTarget(
            "answer", run_answer, lambda: [b"\x0a\x04\x08\x05\x10\x07", b"\x1a\x02\x12\x00"]
        ),
        FuzzTarget("normal", run_normal, lambda: [b"{}", b'{"normals": [{"model": 1}]}']),
        FuzzTarget("recording", run_recording, _numbered),
        FuzzTarget("disk_queue", run_disk_queue, no_seeds),
        FuzzTarget(
            "control", run_control, lambda: CONTROL_SEEDS, (b'"pid": ', b"null", b"1e999", b"[")
        ),
        FuzzTarget(
            "exposition",
            run_exposition,
            lambda: [b'vllm:num_requests_running{a="b"} 1\n', b"n 1"],
            (*(name.encode() for name in sorted(served.NAMES)), b"NaN", b"Inf"),
        ),
        FuzzTarget("elf", run_elf, no_seeds),
        FuzzTarget("image", run_image, no_seeds),
    )
}

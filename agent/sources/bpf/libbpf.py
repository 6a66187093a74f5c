"""A small binding over libbpf.so.1: open, set constants, load, attach, reach maps.

Nothing is pinned and links are held by descriptors only, so the kernel takes
everything back when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from dsagent.agent.errors import SourceUnavailable

_LOG_LINE_BYTES_MAX = 1 << 20  # the verifier's whole account comes as one
_LOG_TAIL_CHARACTERS = 16384
_PrintFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_P, _I, _U32, _SIZE, _STR = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_size_t,
    ctypes.c_char_p,
)
_PROTOTYPES: dict[str, tuple[object, list[object]]] = {
    "libbpf_set_print": (_P, [_P]),
    "libbpf_num_possible_cpus": (_I, []),
    "bpf_object__open_file": (_P, [_STR, _P]),
    "bpf_object__load": (_I, [_P]),
    "bpf_object__close": (None, [_P]),
    "bpf_object__find_map_by_name": (_P, [_P, _STR]),
    "bpf_object__find_program_by_name": (_P, [_P, _STR]),
    "bpf_program__attach": (_P, [_P]),
    "bpf_program__attach_perf_event": (_P, [_P, _I]),
    "bpf_program__fd": (_I, [_P]),
    "bpf_program__set_autoload": (_I, [_P, ctypes.c_bool]),
    "bpf_program__set_expected_attach_type": (_I, [_P, _I]),
    "bpf_enable_stats": (_I, [_I]),
    "bpf_map__reuse_fd": (_I, [_P, _I]),
    "bpf_link__fd": (_I, [_P]),
    "bpf_link__destroy": (_I, [_P]),
    "bpf_map__fd": (_I, [_P]),
    "bpf_map__value_size": (_U32, [_P]),
    "bpf_map__max_entries": (_U32, [_P]),
    "bpf_map__set_max_entries": (_I, [_P, _U32]),
    "bpf_map__initial_value": (_P, [_P, ctypes.POINTER(_SIZE)]),
    "bpf_map_lookup_elem": (_I, [_I, _P, _P]),
    "bpf_map_update_elem": (_I, [_I, _P, _P, ctypes.c_uint64]),
    "bpf_map_delete_elem": (_I, [_I, _P]),
    "bpf_iter_create": (_I, [_I]),
    "btf__load_vmlinux_btf": (_P, []),
    "btf__free": (None, [_P]),
    "btf__find_by_name": (ctypes.c_int32, [_P, _STR]),
    "btf__type_by_id": (_P, [_P, _U32]),
}


_BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
_LINK_CREATE = 28
_UPROBE_MULTI = 48  # enum bpf_attach_type


class Library:
    """libbpf.so.1 with its prototypes. Raises SourceUnavailable where it is not installed."""

    def __init__(self, name: str = "libbpf.so.1") -> None:
        try:
            self._c = ctypes.CDLL(name, use_errno=True)
            for function, (result, arguments) in _PROTOTYPES.items():
                entry = getattr(self._c, function)
                entry.restype, entry.argtypes = result, arguments
        except OSError as error:
            raise SourceUnavailable(
                f"{name} is not installed (Debian and Ubuntu: apt-get install libbpf1)"
            ) from error
        except AttributeError as error:
            raise SourceUnavailable(f"{name} is older than libbpf 1.0: {error}") from error
        self._libc = ctypes.CDLL(None)
        self._calls = ctypes.CDLL(None, use_errno=True)
        self._print = _PrintFn(self._take_line)  # libbpf keeps the pointer: it must live on
        self._c.libbpf_set_print(ctypes.cast(self._print, ctypes.c_void_p))
        self._log = ""
        self._btf: int | None = None

    def _take_line(self, level: int, template: bytes, arguments: int) -> int:
        """libbpf's printer, called while it opens and loads; keeps warnings (0) only."""
        if level == 0:
            line = ctypes.create_string_buffer(_LOG_LINE_BYTES_MAX)
            self._libc.vsnprintf(line, len(line), template, ctypes.c_void_p(arguments))
            text = self._log + line.value.decode("utf-8", "replace")
            self._log = text[-_LOG_TAIL_CHARACTERS:]
        return 0

    def take_log(self) -> str:
        """What libbpf said since the last call: the end of it."""
        text, self._log = self._log, ""
        return text

    @property
    def calls(self) -> ctypes.CDLL:
        return self._c

    def system_call(self, command: int, attributes: ctypes.Array[ctypes.c_char], size: int) -> int:
        """bpf(2) itself, for what this library does not know; its result, and ctypes' errno."""
        number = _BPF_SYSCALL[platform.machine()]
        return int(self._calls.syscall(number, command, attributes, size))

    def possible_cpus(self) -> int:
        return max(1, int(self._c.libbpf_num_possible_cpus()))

    def enable_run_stats(self) -> int | None:
        """Have the kernel time each run of each program until the descriptor is closed; None
        where it may not be asked to."""
        fd = int(self._c.bpf_enable_stats(0))
        return fd if fd >= 0 else None

    def arguments_of(self, tracepoint: str) -> int | None:
        """How many arguments the kernel's BTF gives a tracepoint; None: it does not say."""
        self._btf = self._btf or self._c.btf__load_vmlinux_btf()
        if not self._btf:
            return None
        found = self._c.btf__find_by_name(self._btf, f"btf_trace_{tracepoint}".encode())
        for _ in range(2):  # typedef → pointer → function
            if found <= 0:
                return None
            found = ctypes.cast(
                self._c.btf__type_by_id(self._btf, found), ctypes.POINTER(ctypes.c_uint32)
            )[2]
        info = ctypes.cast(
            self._c.btf__type_by_id(self._btf, found), ctypes.POINTER(ctypes.c_uint32)
        )[1]
        return int(info & 0xFFFF) - 1  # the first is the tracepoint's own data

    def forget_types(self) -> None:
        """Free what `arguments_of` keeps for the next call: the kernel's BTF is large."""
        if self._btf:
            self._c.btf__free(self._btf)
            self._btf = None


class Map:
    """A loaded map."""

    def __init__(self, library: Library, pointer: int) -> None:
        self._c = library.calls
        self.fd = int(self._c.bpf_map__fd(pointer))
        self.value_bytes = int(self._c.bpf_map__value_size(pointer))
        self.entries = int(self._c.bpf_map__max_entries(pointer))

    def lookup(self, key: bytes) -> bytes | None:
        value = ctypes.create_string_buffer(self.value_bytes)
        if self._c.bpf_map_lookup_elem(self.fd, key, value) != 0:
            return None
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        if self._c.bpf_map_update_elem(self.fd, key, value, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"updating a BPF map: {os.strerror(code)}")

    def delete(self, key: bytes) -> None:
        """What is not there is not missed."""
        self._c.bpf_map_delete_elem(self.fd, key)

    def map_memory(self) -> mmap.mmap:
        """The values of a BPF_F_MMAPABLE array, shared with the kernel."""
        size = (self.value_bytes + 7) // 8 * 8 * self.entries
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return mmap.mmap(self.fd, pages, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


class BpfObject:
    """One compiled object from opening to closing; closing detaches and frees everything."""

    def __init__(self, library: Library, path: Path) -> None:
        self._library, self._c, self._path = library, library.calls, path
        self._links: dict[str, list[int]] = {}  # by program
        library.take_log()
        self._object: int | None = self._c.bpf_object__open_file(os.fsencode(path), None)
        if not self._object:
            raise self._unavailable("cannot be opened", ctypes.get_errno())

    def __enter__(self) -> BpfObject:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _unavailable(self, what: str, code: int) -> SourceUnavailable:
        return SourceUnavailable(
            f"{self._path.name} {what}: {explain(code, self._library.take_log())}"
        )

    def _find(self, kind: str, name: str) -> int:
        pointer = getattr(self._c, f"bpf_object__find_{kind}_by_name")(self._object, name.encode())
        if not pointer:
            raise SourceUnavailable(
                f"{self._path.name} has no {kind} {name}: it was built from another version, "
                "rebuild it (make bpf)"
            )
        return int(pointer)

    def set_constants(self, constants: bytes) -> None:
        """Fill .rodata before loading; the object declares exactly one constant structure."""
        size = ctypes.c_size_t()
        start = self._c.bpf_map__initial_value(self._find("map", ".rodata"), ctypes.byref(size))
        if not start or size.value != len(constants):
            raise SourceUnavailable(
                f"{self._path.name} was built from another version, rebuild it (make bpf)"
            )
        ctypes.memmove(start, constants, len(constants))

    def set_entries(self, map_name: str, entries: int) -> None:
        if self._c.bpf_map__set_max_entries(self._find("map", map_name), entries) != 0:
            raise self._unavailable(f"refuses {entries} entries in {map_name}", ctypes.get_errno())

    def leave_out(self, program: str) -> None:
        """Do not load it: this kernel has not what it is attached to."""
        self._c.bpf_program__set_autoload(self._find("program", program), False)

    def for_uprobes(self, program: str) -> None:
        """Say before loading that it will be attached by `attach_uprobes`. (The library knows such
        programs by their section's name since 1.3 only.)"""
        self._c.bpf_program__set_expected_attach_type(self._find("program", program), _UPROBE_MULTI)

    def share(self, owner: BpfObject, maps: Iterable[str]) -> None:
        """Use the maps of another object that is loaded, instead of own ones. Before loading."""
        for name in maps:
            if self._c.bpf_map__reuse_fd(self._find("map", name), owner.map(name).fd) != 0:
                raise self._unavailable(f"cannot share {name}", ctypes.get_errno())

    def load(self) -> None:
        if self._c.bpf_object__load(self._object) != 0:
            raise self._unavailable("cannot be loaded", ctypes.get_errno())

    def attach(self, program: str) -> int:
        """Attach; returns the link's descriptor, which the object keeps."""
        return self._keep(program, self._c.bpf_program__attach(self._find("program", program)))

    def attach_perf(self, program: str, perf_fd: int) -> int:
        """Attach to an event of perf_event_open, whose descriptor becomes the link's."""
        link = self._c.bpf_program__attach_perf_event(self._find("program", program), perf_fd)
        if not link:
            os.close(perf_fd)
        return self._keep(program, link)

    def attach_uprobes(self, program: str, path: str, offsets: Sequence[int]) -> int:
        """Attach to these offsets of a file, in whatever process runs them; returns the link's
        descriptor, which the caller closes. Raises OSError."""
        name = ctypes.create_string_buffer(os.fsencode(path))
        places = (ctypes.c_uint64 * len(offsets))(*offsets)
        attributes = struct.pack(
            "=IIIIQQQQIII4x",
            int(self._c.bpf_program__fd(self._find("program", program))),
            0,
            _UPROBE_MULTI,
            0,
            ctypes.addressof(name),
            ctypes.addressof(places),
            0,  # no reference counters
            0,  # no cookies
            len(offsets),
            0,
            0,  # any process: the program looks at its pid itself
        )
        memory = ctypes.create_string_buffer(attributes, len(attributes))
        fd = self._library.system_call(_LINK_CREATE, memory, len(attributes))
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"attaching to {path}: {os.strerror(code)}")
        return fd

    def _keep(self, program: str, link: int | None) -> int:
        if not link:
            raise self._unavailable(f"cannot attach {program}", ctypes.get_errno())
        self._links.setdefault(program, []).append(link)
        return int(self._c.bpf_link__fd(link))

    def detach(self, program: str) -> None:
        """It stays loaded, and may be attached again."""
        for link in self._links.pop(program, ()):
            self._c.bpf_link__destroy(link)

    def runs(self, program: str) -> tuple[int, int]:
        """How often it ran while the kernel was asked to time it, and nanoseconds in all."""
        fd = int(self._c.bpf_program__fd(self._find("program", program)))
        text = Path(f"/proc/self/fdinfo/{fd}").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return int(fields.get("run_cnt", 0)), int(fields.get("run_time_ns", 0))

    def run_iterator(self, link_fd: int) -> None:
        """Run an attached iterator program over everything once."""
        fd = self._c.bpf_iter_create(link_fd)
        if fd < 0:
            raise self._unavailable("cannot run its iterator", ctypes.get_errno())
        try:
            while os.read(fd, 4096):
                pass
        finally:
            os.close(fd)

    def map(self, name: str) -> Map:
        return Map(self._library, self._find("map", name))

    def close(self) -> None:
        for program in list(self._links):
            self.detach(program)
        if self._object:
            self._c.bpf_object__close(self._object)
            self._object = None


def explain(code: int, log: str) -> str:
    """One line for a person out of an errno and libbpf's log."""
    if code == errno.EPERM:
        return "not permitted: run as root, or with CAP_BPF and CAP_PERFMON"
    if code == errno.ENOMEM and "mmap" not in log:
        return "out of memory, or over RLIMIT_MEMLOCK"
    lines = [line.removeprefix("libbpf: ").strip() for line in log.splitlines()]
    telling = [
        line
        for line in lines
        if line and "failed to load" not in line and not line.startswith(("--", "processed "))
    ]
    reason = os.strerror(code) if code else "no reason given"
    return f"{reason}; {telling[-1][:200]}" if telling else reason

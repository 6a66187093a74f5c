"""Compiles the BPF programs next to their sources: `python -m dsagent.agent.sources.bpf.build`.

Needs clang (with its BPF back end), bpftool, libbpf's headers and the running
kernel's type information. The objects relocate themselves (CO-RE), so they run
on other kernels too. Does nothing where they are up to date.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BTF = Path("/sys/kernel/btf/vmlinux")
HEADERS = (Path("/usr/include"), Path("/usr/local/include"))
PACKAGES = "clang-16 llvm-16 libbpf-dev bpftool"
_TARGETS = {"x86_64": "x86", "aarch64": "arm64"}
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


class BuildError(Exception):
    """What is missing and how to get it, in one line."""


def sources() -> list[Path]:
    return sorted(HERE.glob("*.bpf.c"))


def object_of(source: Path) -> Path:
    return source.with_suffix(".o")


def is_stale(source: Path) -> bool:
    target = object_of(source)
    if not target.exists():
        return True
    inputs = (source, *HERE.glob("*.h"), Path(__file__))
    return target.stat().st_mtime < max(path.stat().st_mtime for path in inputs)


def build() -> list[Path]:
    """Compile what is out of date; returns what was compiled. Raises BuildError."""
    stale = [source for source in sources() if is_stale(source)]
    if not stale:
        return []
    clang, strip = _tool("clang-16", "clang"), _tool("llvm-strip-16", "llvm-strip")
    bpftool = _tool("bpftool")
    machine = platform.machine()
    if machine not in _TARGETS:
        raise BuildError(f"no system call numbers for {machine} in the BPF programs")
    if not any((folder / "bpf" / "bpf_helpers.h").exists() for folder in HEADERS):
        raise BuildError(f"libbpf's headers are missing: apt-get install {PACKAGES}")
    if not BTF.exists():
        raise BuildError(f"the kernel has no type information ({BTF})")
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "vmlinux.h").open("wb") as header:
            dump = [bpftool, "btf", "dump", "file", str(BTF), "format", "c"]
            _run(dump, stdout=header.fileno())
        for source in stale:
            made = Path(folder) / "made.o"
            _run(
                [clang, "-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3"]
                + [f"-D__TARGET_ARCH_{_TARGETS[machine]}", f"-I{folder}"]
                + [f"-I{headers}" for headers in HEADERS]
                + ["-c", str(source), "-o", str(made)]
            )
            _run([strip, "-g", str(made)])
            beside = object_of(source).with_suffix(".o.part")
            shutil.copyfile(made, beside)
            beside.replace(object_of(source))
    return [object_of(source) for source in stale]


def _tool(*names: str) -> str:
    for name in names:
        found = shutil.which(name, path=_PATH)
        if found:
            return found
    raise BuildError(f"{names[0]} is missing: apt-get install {PACKAGES}")


def _run(command: list[str], stdout: int | None = None) -> None:
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=300
    )
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} failed:\n{done.stderr.strip()[-4000:]}")


def main() -> int:
    try:
        made = build()
    except BuildError as error:
        print(f"BPF programs not built: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(f"built {path.name}")
    if not made:
        print("BPF programs are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())

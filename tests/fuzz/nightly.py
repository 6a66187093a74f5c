"""Coverage-guided fuzzing of every target (`make fuzz-nightly`): one process of atheris (libFuzzer)
each, so that one that crashes or hangs is a finding and no end of the others.

What it finds lies in build/fuzz/TARGET/found and is printed as the line that shows it again; copied
into tests/fuzz/found/TARGET it is tried at each commit. What reached new code stays in
build/fuzz/TARGET/corpus for the next night. Exit code 1 with findings.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/fuzz"
HELPERS = ("tests/fuzz", "tests/fixtures")
# A single input may take this long; memory in MiB. Both are findings.
INPUT_SECONDS = 20
MEMORY_MIB = 2048


def fuzz_one(name: str, seconds: int) -> None:
    """In a process of its own, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["dsagent"]):
        from fuzz_targets import TARGETS
    target = TARGETS[name]
    folder = WORK / name
    corpus, found = folder / "corpus", folder / "found"
    for each in (corpus, found):
        each.mkdir(parents=True, exist_ok=True)
    once_found = (path.read_bytes() for path in (Path(__file__).parent / "found" / name).glob("*"))
    for number, seed in enumerate((*target.seeds(), *once_found)):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-artifact_prefix={found}/",
        "-max_len=8192",
        "-print_final_stats=1",
        *([f"-dict={words}"] if target.words else []),
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    """As libFuzzer's dictionaries are written."""
    return "".join(
        chr(byte) if 32 < byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=120, help="for each target")
    parser.add_argument("--only", help="one target, in this very process")
    parser.add_argument("--targets", nargs="*", help="some of them")
    arguments = parser.parse_args()
    if arguments.only:
        fuzz_one(arguments.only, arguments.seconds)
        return 0
    sys.path[:0] = [str(ROOT / folder) for folder in HELPERS]
    from fuzz_targets import TARGETS

    paths = os.pathsep.join(str(ROOT / folder) for folder in HELPERS)
    failed = []
    for name in arguments.targets or TARGETS:
        log = WORK / name / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        found = WORK / name / "found"
        for old in found.glob("*"):  # of another night
            old.unlink()
        # libFuzzer leaves at once, and its files behind; in memory they are written faster.
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with log.open("wb") as file, tempfile.TemporaryDirectory(dir=in_memory) as folder:
            ran = subprocess.run(
                [sys.executable, __file__, "--only", name, "--seconds", str(arguments.seconds)],
                env={**os.environ, "PYTHONPATH": paths, "TMPDIR": folder},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=arguments.seconds + 120,
                check=False,
            )
        lines = log.read_text(errors="replace").splitlines()
        tried = next((line.split()[-1] for line in lines if "number_of_executed" in line), "?")
        print(f"{name:12} {'ok' if ran.returncode == 0 else 'FOUND'}  {tried} inputs", flush=True)
        if ran.returncode:
            failed.append(name)
            print(f"  see {log}; found:", *found.glob("*"), sep="\n    ")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Builds the sidecar's image with buildah, and says how large it is.

`image.py build` prints the size of the base layer and of what lies on top of it, and ends with 1
where that is more than allowed. `image.py base NAME` makes a base by mmdebstrap where no registry
can be reached. What pip and apt of this machine are told (indices, proxies, certificates) holds
while the image is built, and none of it stays in there.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import tomllib

ROOT = Path(__file__).resolve().parent.parent
BASE = "docker.io/library/debian:bookworm-slim"
MOST_COMPRESSED_BYTES = 150_000_000  # on top of the base
MOST_UNPACKED_BYTES = 350_000_000
LENT = Path("/run/dsagent-build")  # where the build sees what this machine lends it
# As Debian's own slim images leave them out.
_SLIM = ("doc/*", "info/*", "lintian/*", "linda/*", "locale/*", "man/*", "groff/*")


class ImageError(Exception):
    """What went wrong, in a line."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Some layers of an image, together."""

    count: int
    compressed_bytes: int  # as a registry keeps and sends them: gzip
    unpacked_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    base: Layers
    on_top: Layers

    def too_large(self) -> bool:
        return (
            self.on_top.compressed_bytes > MOST_COMPRESSED_BYTES
            or self.on_top.unpacked_bytes > MOST_UNPACKED_BYTES
        )

    def __str__(self) -> str:
        rows = [("", "layers", "compressed", "unpacked")]
        for name, each in (("base", self.base), ("on top of it", self.on_top)):
            megabytes = (_megabytes(each.compressed_bytes), _megabytes(each.unpacked_bytes))
            rows.append((name, f"{each.count}", *megabytes))
        allowed = (_megabytes(MOST_COMPRESSED_BYTES), _megabytes(MOST_UNPACKED_BYTES))
        rows.append(("allowed", "", *allowed))
        return "\n".join(f"{a:<13}{b:>6}{c:>12}{d:>10}" for a, b, c, d in rows)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def run(*command: str | Path, capture: bool = False) -> str:
    """Its output where it is captured; otherwise it is shown. Raises ImageError."""
    if shutil.which(command[0]) is None:
        raise ImageError(f"{command[0]} is missing: apt-get install buildah mmdebstrap")
    done = subprocess.run(
        command, stdout=subprocess.PIPE if capture else sys.stderr, text=True, check=False, cwd=ROOT
    )
    if done.returncode != 0:
        raise ImageError(f"{command[0]} {command[1]} failed (exit code {done.returncode})")
    return done.stdout or ""


# --- what this machine tells pip --------------------------------------------------------------


def pip_settings() -> dict[str, str]:
    """`pip config list`, without the sections: of several, the last one counts. None without
    pip."""
    if find_spec("pip") is None:
        return {}
    listed = run(sys.executable, "-m", "pip", "config", "list", capture=True)
    found = {}
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return found


def mounts(folder: Path) -> list[str]:
    """Options that lend the build this machine's pip settings, and the files and folders that
    they name; `folder` holds the file that they are written to."""
    lent: dict[Path, Path] = {}  # where it is seen → what it is

    def seen(word: str) -> str:
        place = urlsplit(word)
        path = Path(place.path)
        if place.scheme not in ("", "file") or not path.is_absolute() or not path.exists():
            return word
        # A local index refers to the files beside it.
        whole = path.parent if place.scheme else path
        there = LENT / f"{len(lent)}" / whole.name
        lent[there] = whole
        return place._replace(path=str(there / path.relative_to(whole))).geturl()

    settings = pip_settings()
    lines = (
        f"{name} = {' '.join(seen(word) for word in value.split())}"
        for name, value in settings.items()
    )
    conf = folder / "pip.conf"
    conf.write_text("\n".join(("[global]", *lines, "")))
    lent[Path("/etc/pip.conf")] = conf
    return [f"--volume={path}:{there}:ro" for there, path in lent.items()]


# --- building ---------------------------------------------------------------------------------


def build(tag: str, base: str, target: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    # No runtime is needed to build: its limits and namespaces are another machine's concern.
    command = (
        "buildah", "build", "--layers", "--isolation=chroot", "--network=host", "--format=oci",
        "--file=deploy/Containerfile", "--ignorefile=deploy/Containerfile.dockerignore",
        f"--build-arg=BASE={base}",
        f"--build-arg=VERSION={version}", f"--build-arg=REVISION={_revision()}",
    )  # fmt: skip
    # What is lent leaves empty folders where it was seen: the stage that the result stands on is
    # made before, without, and the last one runs nothing.
    run(*command, "--target=runtime", ".")
    with tempfile.TemporaryDirectory() as folder:
        run(*command, f"--target={target}", f"--tag={tag}", *mounts(Path(folder)), ".")


def _revision() -> str:
    try:
        return run("git", "rev-parse", "HEAD", capture=True).strip()
    except ImageError:
        return "unknown"  # an archive, not a checkout


def make_base(tag: str, suite: str) -> None:
    """A base like Debian's slim one, from Debian's packages."""
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder) / "base.tar"
        run(
            "mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io",
            *(f"--dpkgopt=path-exclude=/usr/share/{each}" for each in _SLIM),
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
            suite, str(tar),
        )  # fmt: skip
        made = run("buildah", "from", "scratch", capture=True).strip()
        try:
            run("buildah", "add", "--quiet", made, str(tar), "/")
            run("buildah", "config", "--cmd=bash", made)
            run("buildah", "commit", "--quiet", "--format=oci", made, tag)
        finally:
            run("buildah", "rm", made)


# --- sizes ------------------------------------------------------------------------------------


def sizes(tag: str, base: str) -> Sizes:
    """Measured on what a registry would be sent."""
    base_layers = len(_diff_ids(base))
    with tempfile.TemporaryDirectory() as folder:
        run("buildah", "push", "--quiet", "--format=oci", tag, f"oci:{folder}/image")
        blobs = Path(folder) / "image" / "blobs"

        def blob(digest: str) -> Path:
            return blobs / digest.replace(":", "/")

        index = json.loads((blobs.parent / "index.json").read_text())
        manifest = json.loads(blob(index["manifests"][0]["digest"]).read_text())
        files = [blob(layer["digest"]) for layer in manifest["layers"]]
        return Sizes(_measured(files[:base_layers]), _measured(files[base_layers:]))


def _measured(files: list[Path]) -> Layers:
    unpacked = 0
    for path in files:
        with gzip.open(path) as stream:
            while chunk := stream.read(1 << 20):
                unpacked += len(chunk)
    return Layers(len(files), sum(path.stat().st_size for path in files), unpacked)


def _diff_ids(image: str) -> list[str]:
    described = json.loads(run("buildah", "inspect", "--type=image", image, capture=True))
    return list(described["OCIv1"]["rootfs"]["diff_ids"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("build", "build it, say how large it is"), ("sizes", "of one built")):
        command = commands.add_parser(name, help=what)
        command.add_argument("--tag", default="localhost/dsagent:latest")
        command.add_argument("--base", default=os.environ.get("DSAGENT_BASE", BASE))
        if name == "build":
            command.add_argument("--target", default="sidecar", choices=("sidecar", "filecaps"))
    command = commands.add_parser("base", help="make a base from Debian's packages")
    command.add_argument("tag")
    command.add_argument("--suite", default="bookworm")
    arguments = parser.parse_args()
    try:
        if arguments.command == "base":
            make_base(arguments.tag, arguments.suite)
            return 0
        if arguments.command == "build":
            build(arguments.tag, arguments.base, arguments.target)
        found = sizes(arguments.tag, arguments.base)
    except ImageError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(found)) if arguments.json else f"{arguments.tag}\n{found}")
    return int(found.too_large())


if __name__ == "__main__":
    sys.exit(main())

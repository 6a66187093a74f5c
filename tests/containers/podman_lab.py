"""Real containers for the tests: podman and buildah with a storage of their own.

Two things of a development machine stand in the way of an ordinary podman, and are gone round here
alone: raising limits and setting up the device cgroup may be refused, so the runtime is crun
without either; and cgroups may be mounted in hybrid mode, which crun does not take, so all of it
runs in a mount namespace where they are mounted as version 2.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "build" / "containers"  # they stay there from run to run: layers are used again
PATIENCE_S = 120.0  # for what podman does at once; only a failure ever waits so long
PROGRAMS = ("podman", "crun", "buildah", "mmdebstrap", "unshare", "nsenter")
SECCOMP = Path("/usr/share/containers/seccomp.json")

# As the profiles of today's runtimes have it; Debian 12's asks for CAP_SYS_ADMIN.
_SECCOMP_RULES = (("CAP_BPF", "bpf"), ("CAP_PERFMON", "perf_event_open"))

_RUNTIME = f"""#!{sys.executable} -SE
import json, os, sys
def mend(path, process_of):
    with open(path) as file:
        config = json.load(file)
    process = process_of(config)
    process.pop("rlimits", None)
    config.get("linux", {{}}).pop("resources", None)
    # Kubernetes gives no ambient capabilities to who is not root, podman does.
    process.get("capabilities", {{}}).update(ambient=[], inheritable=[])
    with open(path, "w") as file:
        json.dump(config, file)
for option, value in zip(sys.argv, sys.argv[1:]):
    if option == "--bundle":
        mend(os.path.join(value, "config.json"), lambda config: config["process"])
    elif option == "--process":
        mend(value, lambda config: config)
state = os.path.join(os.path.dirname(sys.argv[0]), "state")
os.execvp("crun", ["crun", "--root", state, *sys.argv[1:]])
"""

_STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{graph}"\nrunroot = "{run}"\n'

_CGROUP = "/sys/fs/cgroup/libpod_parent"  # podman leaves it behind

# Those that others depend on go the second time.
_REMOVE_ALL = ("--log-level=fatal", "rm", "--all", "--force", "--volumes", "--time=0")

# Lives until its standard input is closed, by us or by our death; then nothing runs on.
_NAMESPACE = (
    "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && echo ready && cat; "
    f"podman {' '.join(_REMOVE_ALL)}; podman {' '.join(_REMOVE_ALL)}; "
    f"rmdir {_CGROUP}/conmon {_CGROUP} 2>/dev/null"
)


def why_not() -> str:
    """Why there can be no containers here; empty: there can."""
    if os.geteuid() != 0:
        return "containers need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: bash scripts/setup_containers.sh"
    return ""


class Lab:
    """The storage, the settings and the mount namespace; every container is removed at the end."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for what is gone when the tests are over."""
        self._folder = folder
        self._environment = {**os.environ, **_settings(folder)}
        self.seccomp = folder / "seccomp.json"
        self.seccomp.write_text(json.dumps(_seccomp()))
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", _NAMESPACE],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # it outlives us, to clean up
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self._holder.kill()
            self._holder.communicate()
            raise AssertionError("no mount namespace with cgroups of version 2 can be made here")

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.run("podman", *_REMOVE_ALL, check=False)
            self.run("podman", *_REMOVE_ALL)
            # What podman keeps mounted for itself.
            self.run("umount", "--recursive", self._folder / "storage" / "overlay", check=False)
            shutil.rmtree(self._folder / "storage")
        finally:
            self._holder.communicate(timeout=PATIENCE_S)

    def build(self, *command: str, timeout_s: float) -> str:
        """A command that makes images, where they stay; its output."""
        store = {"CONTAINERS_STORAGE_CONF": str(self._folder / "images.conf")}
        return self.run(*command, timeout_s=timeout_s, environment=store).stdout

    def run(
        self,
        *command: str | Path,
        timeout_s: float = PATIENCE_S,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command in the mount namespace. Where it fails, its words are in the error."""
        entered = ["nsenter", f"--target={self._holder.pid}", "--mount", f"--wd={ROOT}", "--"]
        done = subprocess.run(
            [*entered, *command],
            env={**self._environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(map(str, command[:3]))} ended with {done.returncode}:\n"
                f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return done

    def podman(
        self, *arguments: str | Path, timeout_s: float = PATIENCE_S, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self.run("podman", "--log-level=error", *arguments, timeout_s=timeout_s, check=check)

    def has_image(self, tag: str) -> bool:
        return self.podman("image", "exists", tag, check=False).returncode == 0

    def inspect(self, name: str, kind: str = "container") -> dict[str, Any]:
        (described,) = json.loads(self.podman("inspect", f"--type={kind}", name).stdout)
        return dict(described)

    def start(
        self,
        name: str,
        image: str,
        *command: str,
        options: Sequence[str] = (),
        entrypoint: str | None = None,
    ) -> Container:
        """Starts a container in the background."""
        entry = [] if entrypoint is None else [f"--entrypoint={entrypoint}"]
        self.podman("run", "--detach", f"--name={name}", *options, *entry, image, *command)
        return Container(self, name)


class Container:
    """One that was started, by its name."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self.name = name

    def exec(
        self, *command: str, timeout_s: float = PATIENCE_S, check: bool = True, user: str = ""
    ) -> subprocess.CompletedProcess[str]:
        options = [f"--user={user}"] if user else []
        return self._lab.podman(
            "exec", *options, self.name, *command, timeout_s=timeout_s, check=check
        )

    @property
    def state(self) -> Mapping[str, Any]:
        return dict(self._lab.inspect(self.name)["State"])

    @property
    def pid(self) -> int:
        """Of its first process, as this machine sees it. Raises where it does not run."""
        pid = int(self.state["Pid"])
        assert pid > 0, f"{self.name} does not run; it said:\n{self.logs()}"
        return pid

    def logs(self) -> str:
        done = self._lab.podman("logs", self.name, check=False)
        return done.stdout + done.stderr

    def signal(self, number: signal.Signals) -> None:
        self._lab.podman("kill", f"--signal={number.name}", self.name)

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        return int(self._lab.podman("wait", self.name).stdout)

    def again(self) -> None:
        """Starts the same container once more, ended or not."""
        self._lab.podman("restart", "--time=10", self.name)

    def remove(self) -> None:
        self._lab.podman("rm", "--force", "--volumes", "--time=0", self.name)


def _settings(folder: Path) -> dict[str, str]:
    """Variables that make podman and buildah use nothing but our own files."""
    runtime = folder / "crun"
    runtime.write_text(_RUNTIME)
    runtime.chmod(0o755)
    engine = folder / "containers.conf"
    engine.write_text(
        "[engine]\n"
        'cgroup_manager = "cgroupfs"\n'
        'events_logger = "file"\n'
        'lock_type = "file"\n'
        'runtime = "crun"\n'
        f'tmp_dir = "{folder}/tmp"\n'
        "[engine.runtimes]\n"
        f'crun = ["{runtime}"]\n'
        "[network]\n"
        f'network_config_dir = "{folder}/networks"\n'
        'network_backend = "netavark"\n'
    )
    storage = folder / "storage.conf"
    storage.write_text(
        _STORAGE.format(graph=folder / "storage", run=folder / "run")
        + f'[storage.options]\nadditionalimagestores = ["{IMAGES}"]\n'
    )
    (folder / "images.conf").write_text(_STORAGE.format(graph=IMAGES, run=folder / "run-images"))
    return {"CONTAINERS_CONF": str(engine), "CONTAINERS_STORAGE_CONF": str(storage)}


def _seccomp() -> dict[str, Any]:
    profile = json.loads(SECCOMP.read_text())
    named = {name for _, name in _SECCOMP_RULES}
    for rule in profile["syscalls"]:
        rule["names"] = [name for name in rule["names"] if name not in named]
    profile["syscalls"] = [rule for rule in profile["syscalls"] if rule["names"]]
    for capability, name in _SECCOMP_RULES:
        profile["syscalls"].append(
            {"names": [name], "action": "SCMP_ACT_ALLOW", "includes": {"caps": [capability]}}
        )
    return dict(profile)

"""The image as it is built: how large, how it begins, what is in it and what is not."""

from __future__ import annotations

import json
import re

import tomllib
from pod import HAPPENS_S, IMAGE, Built, Pod, Rights, send
from podman_lab import ROOT, Lab

# Whatever would build, serve or query, or belongs to the machine that built it.
NOT_THERE = """
for name in clang clang-16 llvm-strip-16 gcc cc ld make bpftool setcap pip pip3; do
    command -v "$name"
done
ls -d /src /etc/pip.conf /run/dsagent-build 2>/dev/null
find / -xdev ( -name "torch" -o -name "duckdb" -o -name "_duckdb*" -o -name "vllm" ) -type d
find / -xdev -name "*.bpf.o.part"
true
""".replace("( ", "\\( ").replace(" )", " \\)")

# What the manifests copy out of it for an engine that has no dsagent of its own.
PLUG_IN = """
site=$(echo /opt/dsagent/lib/python3*/site-packages)
cd "$site" && ls dsagent/instrumentation/vllm.py dsagent/agent/sources/bpf/*.bpf.o &&
    grep -A1 vllm.general_plugins dsagent-*.dist-info/entry_points.txt
"""


def shell(lab: Lab, script: str) -> list[str]:
    options = ["--rm", "--network=none", "--entrypoint=/bin/sh"]
    return lab.podman("run", *options, IMAGE, "-c", script).stdout.splitlines()


def test_it_is_small_on_top_of_its_base(image: Built) -> None:
    on_top = image.sizes["on_top"]
    assert 0 < on_top["compressed_bytes"] <= 150_000_000
    assert on_top["compressed_bytes"] < on_top["unpacked_bytes"] <= 350_000_000
    assert image.sizes["base"]["unpacked_bytes"] > 0


def test_it_begins_as_the_sidecar_and_says_what_it_is(lab: Lab, image: Built) -> None:
    config = lab.inspect(IMAGE, kind="image")["Config"]
    assert (config["Entrypoint"], config["Cmd"]) == (["/opt/dsagent/bin/dsagent"], ["sidecar"])
    assert config["User"] == "0:0"
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["title"] == project["name"]
    assert labels["version"] == project["version"]
    assert labels["licenses"] == project["license"]
    assert labels["description"] == project["description"]
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", labels["revision"])


def test_nothing_is_in_it_that_builds_or_serves_or_is_the_builders(lab: Lab, image: Built) -> None:
    assert shell(lab, NOT_THERE) == []
    history = lab.podman("history", "--no-trunc", "--format=json", IMAGE).stdout
    assert "pip.conf" not in history
    assert "index-url" not in history


def test_the_programs_and_the_plug_in_are(lab: Lab, image: Built) -> None:
    found = shell(lab, PLUG_IN)
    programs = {line.rpartition("/")[2] for line in found if line.endswith(".bpf.o")}
    sources = (ROOT / "agent/sources/bpf").glob("*.bpf.c")
    assert programs == {source.with_suffix(".o").name for source in sources}
    assert "dsagent/instrumentation/vllm.py" in found
    assert "dsagent = dsagent.instrumentation.vllm:register" in found


def test_all_works_in_it_that_its_doctor_looks_at(a_pod: Pod) -> None:
    code, said = a_pod.run(Rights(), "doctor", "--json")
    states = {check["name"]: check["state"] for check in json.loads(said)["checks"]}
    assert code == 0, said
    assert states["BPF programs"] == states["libbpf"] == states["capabilities"] == "ok", said
    assert states["pid namespace"] == "warn"


RECORD_AND_LOOK = """
dsagent attach 2 --duration 2 --record /recordings/one >&2 &&
    dsagent why --recording /recordings/one --json &&
    dsagent fleet sql /recordings slowest
"""


def test_it_records_and_reads_without_duckdb_and_says_what_sql_takes(lab: Lab, a_pod: Pod) -> None:
    send(a_pod.engine(), 1)
    options = [*a_pod.shared, *Rights().options(lab), "--tmpfs=/recordings", "--entrypoint=/bin/sh"]
    command = ("run", "--rm", *options, IMAGE, "-c", RECORD_AND_LOOK)
    done = lab.podman(*command, check=False, timeout_s=HAPPENS_S)
    assert done.returncode == 1, done.stderr
    assert "requests" in json.loads(done.stdout), done.stderr
    assert "pip install 'dsagent[query]'" in done.stderr, done.stderr

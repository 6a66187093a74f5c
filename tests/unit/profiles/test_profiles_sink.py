"""The sink: runs wait for their steps, and become one push each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from made import MS, S, batch, step, until
from pyroscope_recorder import recording

from dsagent.agent.errors import DsagentError
from dsagent.agent.profiles.phases import Weighed
from dsagent.agent.profiles.stacks import Frame, Recorded, Seen
from dsagent.agent.sinks.otlp_config import pyroscope_endpoint
from dsagent.agent.sinks.pyroscope import HEADERS, HOLD_NS, OTHER, PATH, PyroscopeSink, rows

ROOT = Path(__file__).resolve().parents[3]
BEGAN_NS = 2000 * S
FORWARD = Frame("Llama.forward", "/llama.py", 94)


def sink_to(port: int) -> PyroscopeSink:
    return PyroscopeSink(pyroscope_endpoint(f"http://127.0.0.1:{port}", PATH, HEADERS))


def run(*samples: Seen, began_ns: int = BEGAN_NS, repeats: int = 0) -> Recorded:
    return Recorded(4242, began_ns, began_ns + 10 * S, 50 * MS, samples, repeats)


def seen(at_ms: int) -> Seen:
    return Seen(BEGAN_NS + at_ms * MS, 4243, "engine-loop", (FORWARD,))


def test_a_run_waits_for_its_steps_and_is_pushed_with_their_phases() -> None:
    with recording() as server:
        sink = sink_to(server.port)
        sink.start()
        ended_ns = BEGAN_NS + 10 * S
        early = step(1, start_ns=BEGAN_NS, prefill_tokens=9, decode_tokens=0)
        late = step(2, start_ns=BEGAN_NS + 100 * MS)
        sink.take(batch(ended_ns, steps=(early,), profiles=(run(seen(5), seen(50), seen(105)),)))
        assert sink.status().made == 1 and not server.pushes
        sink.take(batch(ended_ns + HOLD_NS, steps=(late,)))
        until(lambda: sink.status().acknowledged == 1)
        sink.stop(5.0)
    ((path, headers, _),) = server.pushes
    assert path == "/push.v1.PusherService/Push"
    assert headers["content-type"] == "application/proto"
    (pushed,) = server.read()
    phases = {sample.labels["phase"] for sample in pushed.profile.samples}
    assert phases == {"prefill", "idle", "decode"}
    assert {sample.labels["role"] for sample in pushed.profile.samples} == {"engine"}
    assert sum(sample.values["cpu"] for sample in pushed.profile.samples) == 3 * 50 * MS


def test_the_labels_are_what_the_boards_and_data_sources_ask_for() -> None:
    with recording() as server:
        sink = sink_to(server.port)
        sink.start()
        sink.take(batch(profiles=(run(seen(5)),)))
        sink.stop(5.0)
        (pushed,) = server.read()
    provisioning = ROOT / "dashboards/provisioning/datasources.yaml"
    sources = yaml.safe_load(provisioning.read_text())["datasources"]
    (asked,) = (
        source["jsonData"]["tracesToProfiles"]
        for source in sources
        if "tracesToProfiles" in source.get("jsonData", {})
    )
    (cpu,) = (each for each in pushed.profile.types if each[0] == "cpu")
    kind = ":".join((pushed.labels["__name__"], *cpu, *pushed.profile.period_type))
    assert kind == asked["profileTypeId"]
    for tag in asked["tags"]:
        assert pushed.labels[tag["value"]] == "reference"
    board = (ROOT / "dashboards/generated/dsagent-trace.json").read_text()
    assert kind in board
    panels = [each for each in json.loads(board)["panels"] if each["type"] == "flamegraph"]
    (selector,) = (target["labelSelector"] for panel in panels for target in panel["targets"])
    assert set(re.findall(r"(\w+)=~", selector)) == {"service_name"} <= set(pushed.labels)


def test_what_is_held_at_the_end_still_goes_out() -> None:
    with recording() as server:
        sink = sink_to(server.port)
        sink.start()
        sink.take(batch(BEGAN_NS + 10 * S, profiles=(run(seen(5)),)))
        sink.stop(5.0)
        status = sink.status()
    assert (status.made, status.acknowledged, status.dropped) == (1, 1, 0)


def test_a_refusal_is_counted() -> None:
    with recording() as server:
        server.status = 400
        sink = sink_to(server.port)
        sink.start()
        sink.take(batch(BEGAN_NS + 20 * S, profiles=(run(seen(5)),)))
        until(lambda: sink.status().failed == 1)
        sink.stop(1.0)
    assert sink.status().lost == {"refused": 1}


def test_nobody_there_costs_nothing_but_the_profile() -> None:
    with recording() as server:
        port = server.port
    sink = sink_to(port)
    sink.start()
    for _ in range(100):  # more than are held
        sink.take(batch(BEGAN_NS + 11 * S, profiles=(run(seen(5)),)))
    sink.stop(0.5)
    status = sink.status()
    assert status.made == 100 and status.acknowledged == 0
    assert status.failed + status.dropped == 100
    assert status.lost["queue_full"] == 36


def test_equal_stacks_are_one_row_and_names_are_bounded() -> None:
    one = Weighed((FORWARD,), "engine-loop", "engine", "decode", 0.4)
    many = [Weighed((FORWARD,), f"pool-{n}", "engine", None, 1.0) for n in range(100)]
    made = rows([one, one, one, *many], 50 * MS)
    assert made[0].values == (1, 60 * MS)
    assert len({row.labels["thread"] for row in made}) == 33
    (other,) = (row for row in made if row.labels["thread"] == OTHER)
    assert sum(row.values[1] for row in made) == 60 * MS + 100 * 50 * MS
    assert "phase" not in other.labels


@pytest.mark.parametrize("url", ["", "127.0.0.1:4040", "ftp://x", "http://[", "http://a b"])
def test_what_is_no_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(DsagentError, match="--pyroscope") as error:
        pyroscope_endpoint(url, PATH, HEADERS)
    assert "\n" not in str(error.value)


def test_a_path_of_ones_own_stays() -> None:
    assert pyroscope_endpoint("https://p.example/pyro/", PATH, {}).path == "/pyro" + PATH

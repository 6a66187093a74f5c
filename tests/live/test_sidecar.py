"""The real `dsagent sidecar` beside real engines that come, go, crash and come again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from datetime import datetime
from pathlib import Path

import made_status
import pytest
from otlp_load import hanging_back_end
from shell_lab import add_up, dsagent
from sidecar_lab import Lab, Sidecar, explained, until

from dsagent.agent.listening import control

pytestmark = pytest.mark.usefixtures("the_only_sidecar")


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(f"{request.node.name}-{os.getpid()}")


def test_engines_come_crash_and_come_again(lab: Lab) -> None:
    with lab.sidecar() as sidecar:
        status, text = sidecar.page("/readyz")
        assert (status, json.loads(text)["reasons"]) == (503, ["no engine has been found"])
        with lab.engine() as b:
            with lab.engine() as a:
                sidecar.watching(a.pid)
                sidecar.watching(b.pid)
                assert sidecar.page("/readyz")[0] == 200
                a.do("request first-of-a")
                b.do("request first-of-b")
                for request in ("first-of-a", "first-of-b"):
                    document = until(lambda r=request: explained(r), request)
                    assert document["request_id"] == request
                    add_up(document)
                told = dsagent("explain", "first-of-b", "--pid", str(b.pid)).stdout
                assert told.startswith("request first-of-b")
                a_pid = a.pid
                os.kill(a.pid, signal.SIGKILL)
                sidecar.said(rf"engine\.ended .*\(pid {a_pid}\); 1 request, 6 steps")
            with lab.engine() as again:
                sidecar.watching(again.pid)
                again.do("request second-of-a")
                assert until(lambda: explained("second-of-a"), "after the restart")
                assert explained("first-of-a") is not None  # of before the restart
                assert explained("first-of-a", a_pid) is not None
                assert explained("first-of-a", b.pid) is None
                status = sidecar.status()
                assert set(status) == set(made_status.SIDECAR)
                for part in ("settings", "listener", "receiver", "memory", "recent", "scan"):
                    assert set(status[part]) == set(made_status.SIDECAR[part])
                engines = sidecar.engines()
                assert set(engines[b.pid]) == set(made_status.ENGINE)
                assert engines[again.pid]["restarts"] == 1
                assert engines[b.pid]["restarts"] == 0
                assert {each["state"] for each in engines.values()} == {"watching"}
                # The engine that came again counts on where the first one was.
                _, page = sidecar.page("/metrics")
                numbers = re.findall(r'dsagent_requests_total\{engine="(\d)".*\} ([\d.]+)', page)
                place = engines[again.pid]["engine"]
                assert dict(numbers) == {place: "2.0", engines[b.pid]["engine"]: "1.0"}
                assert "dsagent_sidecar_restarts_total 1.0" in page
                why = json.loads(dsagent("why", "--json").stdout)
                assert why["requests"] == 3
                only_b = json.loads(dsagent("why", "--pid", str(b.pid), "--json").stdout)
                assert only_b["requests"] == 1
        sidecar.signal(signal.SIGTERM)
        assert sidecar.wait() == 0


def test_at_its_end_it_says_what_it_has_seen_of_each(lab: Lab) -> None:
    with lab.sidecar() as sidecar, lab.engine() as engine:
        sidecar.watching(engine.pid)
        engine.do("request one")
        sidecar.signal(signal.SIGTERM)
        assert sidecar.wait() == 0
        said = rf"engine\.ended .*\(pid {engine.pid}\); 1 request, 6 steps$"
        assert [line for line in sidecar.err if re.search(said, line)], sidecar.err


def test_it_says_how_long_it_looked_whatever_time_its_back_ends_take(lab: Lab) -> None:
    """Which requests it can have seen is told by that, not by when its end is told."""
    with hanging_back_end() as port:
        flags = ("--json", "--otlp-endpoint", f"http://127.0.0.1:{port}")
        with lab.sidecar(*flags) as sidecar, lab.engine() as engine:
            sidecar.said(rf"engine\.attached.*{engine.pid}")
            engine.do("request whole")
            until(lambda: explained("whole"), "its account")
            sidecar.signal(signal.SIGTERM)
            assert sidecar.wait() == 0
            lines = {line["event"]: line for line in map(json.loads, sidecar.err)}
    attached, stopping, ended = (
        datetime.fromisoformat(lines[event]["time"]).timestamp()
        for event in ("engine.attached", "sidecar.stopping", "engine.ended")
    )
    looked = attached + lines["engine.ended"]["duration_ns"] / 1e9
    assert abs(looked - stopping) < ended - looked


def test_what_an_engine_takes_along_is_told_by_name(lab: Lab) -> None:
    with lab.sidecar() as sidecar, lab.engine() as engine:
        sidecar.watching(engine.pid)
        engine.do("request whole")
        engine.do("open cut")
        opened = until(lambda: explained("cut"), "the open request to be seen")
        os.kill(engine.pid, signal.SIGKILL)
        trace_id = opened["trace_id"]
        sidecar.said(
            rf"engine\.ended .*\(pid {engine.pid}\); 1 request, 6 steps; "
            rf"1 more request cut off by its end, of trace {trace_id}$"
        )


def test_an_exec_makes_another_engine_of_a_process(lab: Lab) -> None:
    with lab.sidecar() as sidecar, lab.engine() as engine:
        sidecar.watching(engine.pid)
        engine.do("request before")
        assert until(lambda: explained("before"), "the account of before")
        engine.say("exec")
        sidecar.said(rf"engine\.changed .*\(pid {engine.pid}\): it runs another program now")
        sidecar.said(rf"engine\.attached .*\(pid {engine.pid}\)", times=2)
        engine.do("request after")
        assert until(lambda: explained("after"), "the account of after")
        assert explained("before") is not None
        (only,) = sidecar.engines().values()
        assert only["pid"] == engine.pid
        assert only["requests"] == 1


def test_settings_are_read_again_and_a_wrong_file_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "dsagent.toml"
    file.write_text('max_overhead = "2%"\n')
    with lab.sidecar("--config", str(file)) as sidecar, lab.engine() as engine:
        sidecar.watching(engine.pid)
        engine.do("request before")
        assert until(lambda: explained("before"), "the account of before")
        file.write_text("max_overheat = 1\n")
        sidecar.signal(signal.SIGHUP)
        line = sidecar.said("settings.refused")
        assert "did you mean max_overhead?; the old settings stay" in line
        settings = sidecar.status()["settings"]
        assert (settings["state"], settings["refused"]) == ("refused", 1)
        assert sidecar.page("/readyz")[0] == 503
        engine.do("request meanwhile")
        assert until(lambda: explained("meanwhile"), "an account under the old settings")
        file.write_text('max_overhead = "3%"\nlisten = "127.0.0.1:1"\n[sidecar]\n')
        sidecar.signal(signal.SIGHUP)
        # --listen was given as a flag, which wins: nothing that needs a restart has changed.
        sidecar.said("settings.reloaded settings read again$")
        sidecar.said(rf"engine\.attached .*\(pid {engine.pid}\)", times=2)
        engine.do("request after")
        assert until(lambda: explained("after"), "an account under the new settings")
        assert explained("before") is not None
        status = sidecar.status()
        assert status["settings"]["state"] == "ok"
        assert status["ready"] is True


def test_a_file_that_is_not_there_is_waited_for(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "dsagent.toml"
    with lab.engine() as engine, lab.sidecar("--config", str(file)) as sidecar:
        sidecar.said("settings.refused cannot read .*; waiting for a right one")
        assert sidecar.status()["engines"] == []
        file.write_text('tier = "core"\njson = true\n')
        line = json.loads(sidecar.said('"engine.attached"'))
        assert (line["event"], line["pid"]) == ("engine.attached", engine.pid)


def test_a_port_that_is_taken_is_tried_again(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sidecar = lab.sidecar("--listen", f"127.0.0.1:{port}")
        with sidecar, lab.engine() as engine:
            sidecar.said(rf"sidecar\.waiting cannot listen on 127\.0\.0\.1:{port}")
            sidecar.watching(engine.pid)
            engine.do("request r")
            assert until(lambda: explained("r"), "an account without a port")
            assert sidecar.status()["listener"]["state"] == "waiting"
            taken.close()
            until(lambda: sidecar.status()["listener"]["state"] == "ok", "the port")
            assert "dsagent_requests_total" in sidecar.page("/metrics")[1]


def test_detach_leaves_an_engine_alone_until_it_ends(lab: Lab) -> None:
    with lab.sidecar() as sidecar, lab.engine() as engine:
        sidecar.watching(engine.pid)
        dsagent("detach", str(engine.pid))
        sidecar.said(r"engine\.detached .* is left alone")
        until(lambda: not sidecar.status()["engines"], "no engine to be watched")
        engine.do("request unseen")
        sidecar.signal(signal.SIGHUP)  # who wants it watched again says so
        sidecar.said(rf"engine\.attached .*\(pid {engine.pid}\)", times=2)


def test_killed_it_leaves_nothing_and_the_engine_goes_on(lab: Lab) -> None:
    with lab.engine() as engine:
        with lab.sidecar() as sidecar:
            sidecar.watching(engine.pid)
            assert until(lambda: _bpf_files(sidecar.pid), "its BPF programs") or _no_bpf(sidecar)
            engine.do("request before")
            os.kill(sidecar.pid, signal.SIGKILL)
            sidecar.wait()
        engine.do("request after")
        assert engine.process.poll() is None
        assert control.owner(control.SIDECAR) is None
        with lab.sidecar() as sidecar:
            sidecar.watching(engine.pid)
            engine.do("request watched-again")
            assert until(lambda: explained("watched-again"), "an account after the kill")


def _bpf_files(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            continue
    return [link for link in found if "bpf" in link]


def _no_bpf(sidecar: Sidecar) -> bool:
    (engine,) = sidecar.engines().values()
    return any(s["name"] == "kernel" and s["state"] != "ok" for s in engine["sources"])

"""A server that is attached to while it still loads, and whose worker is killed under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from vllm_lab import Server, one_server_at_a_time
from watched import Watched

from dsagent.instrumentation.ring import Role

DSAGENT = str(Path(sys.executable).with_name("dsagent"))
PATIENCE_S = 120.0


@pytest.mark.timeout(900)
def test_it_is_waited_for_and_its_crash_ends_the_agent_alone(plugged: Any, tmp_path: Path) -> None:
    with one_server_at_a_time():
        server = Server(plugged.overlay.path, "smollm2", tmp_path, "--dtype", "float32")
        agent = subprocess.Popen(
            [DSAGENT, "attach", str(server.pid), "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert agent.stdout is not None and agent.stderr is not None
        try:
            said = []
            for line in agent.stderr:
                said.append(line)
                if line.startswith("attached to"):
                    break
            assert any("waiting for process" in line for line in said), said
            server.wait_until_up()
            assert agent.poll() is None
            watched = Watched(server)
            body = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
            watched.stream("/v1/completions", body)
            watched.until(lambda: watched.steps and Role.RANK in watched.pids, "steps")

            def forever() -> None:
                long = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    server.post("/v1/completions", long)

            client = threading.Thread(target=forever)
            client.start()
            begun = len(watched.steps)
            watched.until(lambda: len(watched.steps) > begun + 5, "steps of the long one")
            os.kill(watched.pids[Role.RANK], signal.SIGKILL)
            server.process.wait(PATIENCE_S)  # vLLM gives up by itself
            client.join(PATIENCE_S)
            output, rest = agent.communicate(timeout=PATIENCE_S)
            watched.close()
        finally:
            agent.kill()
            server.stop()
    assert agent.returncode == 0, rest
    summary = json.loads(output)
    assert summary["engine"] == "vllm"
    assert summary["steps"] > begun
    assert summary["uncounted_losses"] == 0
    assert summary["accounting_failures"] == 0
    assert "Traceback" not in rest

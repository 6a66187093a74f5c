"""Getting in without a redeploy: what the real kubectl asks for, with the shipped profile.

There is no cluster here. A server answers what kubectl asks before, and keeps what it sends.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import ROOT, agent_of, documents, kubectl, one, pod_spec

PROFILE = ROOT / "deploy" / "debug-profile.yaml"
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "pod", "namespace": "default"},
    "spec": {"containers": [{"name": "engine", "image": "engine:1"}]},
    "status": {"phase": "Running"},
}
ANSWERS: dict[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": name,
                "singularName": "",
                "namespaced": True,
                "kind": "Pod",
                "verbs": ["get", "patch"],
            }
            for name in ("pods", "pods/ephemeralcontainers")
        ],
    },
    "/api/v1/namespaces/default/pods/pod": POD,
}


class Cluster(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.patched: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        missing = {"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound"}
        self._answer(200 if path in ANSWERS else 404, ANSWERS.get(path, missing))

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.patched.append((self.path.split("?")[0], body))
        self._answer(200, POD)

    def _answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not on the test's output."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    server = Cluster()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def documented() -> list[str]:
    """The command of docs/kubernetes.md, word by word."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (command,) = (
        block
        for block in text.replace("\\\n", " ").splitlines()
        if block.strip().startswith("kubectl debug")
    )
    return command.split()


def test_the_documented_command_asks_for_the_agents_rights_and_no_more(
    cluster: Cluster, tmp_path: Path
) -> None:
    program, *arguments = documented()
    assert program == "kubectl"
    places = {
        "POD": "pod",
        "--target=ENGINE": "--target=engine",
        "inference": "default",
        "-it": "--attach=false",
    }
    assert set(places) <= set(arguments)
    ran = subprocess.run(
        [kubectl(), "-s", cluster.url, *(places.get(each, each) for each in arguments)],
        capture_output=True, text=True, check=False, timeout=60, cwd=ROOT, stdin=subprocess.DEVNULL,
        env={"HOME": str(tmp_path), "KUBECONFIG": "/dev/null", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    ((path, body),) = cluster.patched
    assert path.endswith("/pods/pod/ephemeralcontainers")
    (added,) = body["spec"]["ephemeralContainers"]
    spec = pod_spec(one(documents("overlays/native"), "Deployment"))
    assert added["securityContext"] == agent_of(spec)["securityContext"]
    assert added["image"].endswith(agent_of(spec)["image"])
    assert added["targetContainerName"] == "engine"
    assert added["command"][0] == "dsagent"


def test_the_profile_holds_only_what_an_ephemeral_container_may_have() -> None:
    """The cluster refuses ports, probes and resources there; kubectl, a name and an image."""
    assert set(yaml.safe_load(PROFILE.read_text())) == {"securityContext"}

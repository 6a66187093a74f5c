"""Rolling into a real S3 server: over TLS, with signatures, resumed after a kill, and when it is
gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_recordings import HOUR, write_recording
from made import S
from otlp_back_ends import Certificates, make_certificates
from s3_server import BUCKET, S3Server, s3_server

from dsagent.agent.fleet.s3 import S3Store
from dsagent.agent.fleet.store import open_store

COMMAND = str(Path(sys.executable).with_name("dsagent"))
STORE = f"s3://{BUCKET}/fleet"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("source") / "rec", (0, 10 * S, HOUR))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server(tmp_path: Path, certificates: Certificates) -> Iterator[S3Server]:
    with s3_server(tmp_path, certificates) as running:
        yield running


def dsagent(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSAGENT_", "AWS_"))}
    return subprocess.run(
        [COMMAND, *argv],
        env={**kept, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_rolled_over_tls_twice_and_the_same(
    recording: Path, server: S3Server, certificates: Certificates
) -> None:
    roll = ("roll", str(recording), STORE, "--pod", "pod-1", "--json")
    trusting = {**server.environ, "AWS_CA_BUNDLE": str(certificates.ca)}
    first = dsagent(*roll, **trusting)
    assert first.returncode == 0, first.stderr
    done = json.loads(first.stdout)
    assert [batch["hour"] for batch in done["batches"]] == ["2023-11-14T22", "2023-11-14T23"]
    objects = server.objects()
    assert sum("raw/requests/hour=" in name for name in objects) == 2
    assert sum(name.endswith(".json") for name in objects if "rolled/" in name) == 2
    again = json.loads(dsagent(*roll, **trusting).stdout)
    assert (again["segments_rolled"], again["segments_before"]) == (0, 3)
    assert server.objects() == objects

    untrusting = dsagent(*roll, **server.environ)
    assert untrusting.returncode == 1
    assert untrusting.stderr.count("\n") == 1, untrusting.stderr
    assert "cannot" in untrusting.stderr


def test_the_same_questions_and_the_same_retention_as_in_a_folder(
    recording: Path, server: S3Server, certificates: Certificates, tmp_path: Path
) -> None:
    trusting = {**server.environ, "AWS_CA_BUNDLE": str(certificates.ca)}
    folder = str(tmp_path / "folder")
    long = tmp_path / "long.toml"
    long.write_text("[raw]\nkeep_days = 36000\n[hourly]\nkeep_days = 36000\n")
    short = tmp_path / "short.toml"
    short.write_text("[raw]\nkeep_days = 1\n[hourly]\nkeep_days = 36000\n")
    answers, deleted = [], []
    for store in (STORE, folder):
        ran = dsagent("roll", str(recording), store, "--pod", "pod-1", **trusting)
        assert ran.returncode == 0, ran.stderr
        ran = dsagent("retain", store, "--policy", str(long), "--json", **trusting)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["batches_added_up"] == 2
        for question in ("slowest", "causes", "culprits", "latency"):
            ran = dsagent("fleet", "sql", store, question, "--json", **trusting)
            assert ran.returncode == 0, ran.stderr
            answers.append(sorted(map(str, json.loads(ran.stdout)["rows"])))
        ran = dsagent("retain", store, "--policy", str(short), "--json", **trusting)
        assert ran.returncode == 0, ran.stderr
        deleted.append([(d["tier"], d["files"]) for d in json.loads(ran.stdout)["deleted"]])
    assert answers[:4] == answers[4:]
    assert all(answers)
    assert deleted[0] == deleted[1]
    left = [name for name in server.objects() if not name.endswith("/")]
    assert {name.split("/")[2] for name in left} == {"hourly", "aggregated"}


def test_who_has_the_wrong_key_is_told_in_one_line(
    recording: Path, server: S3Server, certificates: Certificates
) -> None:
    wrong = {**server.environ, "AWS_SECRET_ACCESS_KEY": "x" * 20}
    ran = dsagent(*("roll", str(recording), STORE, "--s3-ca-file", str(certificates.ca)), **wrong)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert "x" * 20 not in ran.stderr
    assert server.objects() == []


def test_a_server_that_is_gone_costs_nothing_but_time(recording: Path, server: S3Server) -> None:
    server.process.kill()
    server.process.wait(60)
    ran = dsagent("roll", str(recording), STORE, **server.environ)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert len(list(recording.glob("requests-*.parquet"))) == 3


_KILLED = """
import os, signal, sys
from pathlib import Path
from dsagent.agent.fleet.roll import roll
from dsagent.agent.fleet.s3 import S3Store
class Killed(S3Store):
    left = 4
    def put(self, source, path):
        Killed.left -= 1
        if Killed.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().put(source, path)
roll(Path(sys.argv[1]), Killed(sys.argv[2], None, sys.argv[3]), "pod-1")
"""


def test_a_killed_run_is_resumed_and_leaves_no_second_copy(
    recording: Path, server: S3Server, certificates: Certificates
) -> None:
    ca = str(certificates.ca)
    environ = {**os.environ, **server.environ}
    arguments = [sys.executable, "-c", _KILLED, str(recording), STORE, ca]
    assert subprocess.run(arguments, env=environ, check=False, timeout=120).returncode == -9
    left = server.objects()
    assert left
    assert not any(name.endswith(".json") for name in left)
    ran = dsagent(
        *("roll", str(recording), STORE, "--pod", "pod-1", "--s3-ca-file", ca, "--json"),
        **server.environ,
    )
    assert ran.returncode == 0, ran.stderr
    done = json.loads(ran.stdout)
    assert done["remnants_removed"] == len(left)
    assert (done["segments_rolled"], done["segments_before"]) == (3, 0)


def test_a_large_file_goes_up_in_parts_and_comes_back_the_same(
    server: S3Server,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    store = open_store(STORE, None, certificates.ca)
    assert isinstance(store, S3Store)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(25 << 20))
    digest = store.put(large, "raw/steps/large")
    assert digest.bytes == 25 << 20
    assert store.digest("raw/steps/large") == digest
    assert store.digest("raw/steps/none") is None
    store.delete("raw/steps/large")
    store.delete("raw/steps/large")  # gone already
    assert list(store.list("raw")) == []

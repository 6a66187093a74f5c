"""Files and servers that mean harm, or are just wrong: one clear line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dsagent.dashboards.doctor.check import check
from dsagent.dashboards.doctor.findings import InputError
from dsagent.dashboards.doctor.known import Scrape, connect


def dashboards(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsagent.dashboards", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def messages(path: Path) -> list[str]:
    (report,) = check([path], None)
    return [finding.message for finding in report.findings]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "it is not JSON"),
        ("a.json", "[" * 100_000, "it nests too deeply"),
        ("a.json", "3", "it is neither a board nor rules"),
        ("a.json", '{"panels": 7}', "it is neither a board nor rules"),
        ("a.json", "", "it is not JSON"),
        ("a.yaml", "a: [", "it is not YAML"),
        ("a.yaml", "a: &x [*x, *x]", "it has YAML aliases"),
        ("a.yaml", "!!python/object/apply:os.system [true]", "it is not YAML"),
        ("a.yaml", "[" * 20_000, "nest"),
        ("a.yaml", "[" * 100 + "]" * 100, "it nests too deeply"),
        ("a.yaml", "", "it is neither a board nor rules"),
    ],
)
def test_a_file_that_is_nothing_is_one_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    (found,) = messages(tmp_path / name)
    assert message in found
    assert len(found) < 250


def test_files_that_are_none_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert messages(tmp_path / "pipe.json") == ["it is not a file"]
    assert messages(tmp_path / "gone.json") == ["there is no such file"]
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert messages(tmp_path / "bytes.json") == ["it is not text (UTF-8)"]
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(64 << 20)
    assert messages(tmp_path / "huge.json") == ["it is larger than 16 MiB"]


WRONG: list[Any] = [None, 7, "x", [], [7, None], {"a": []}, True, 1e300]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_wrong_types_anywhere_in_a_board_are_survived(tmp_path: Path, wrong: Any) -> None:
    panel = {"title": wrong, "datasource": wrong, "targets": wrong, "panels": wrong}
    target = {"expr": wrong, "datasource": wrong}
    variable = {"name": wrong, "type": "query", "query": wrong, "current": wrong}
    board = {
        "schemaVersion": wrong,
        "uid": wrong,
        "templating": {"list": [variable, wrong]},
        "annotations": wrong,
        "__inputs": [wrong, {"name": wrong}],
        "panels": [panel, wrong, {"targets": [target, wrong, {"expr": "1", "datasource": wrong}]}],
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(board))
    check([path], None)
    path.write_text(json.dumps({"groups": [wrong, {"rules": wrong}, {"rules": [wrong, {}]}]}))
    check([path], None)
    rule = {"expr": wrong, "record": wrong, "alert": wrong, "data": [wrong, {"model": wrong}]}
    path.write_text(json.dumps({"groups": [{"rules": [rule]}]}))
    check([path], None)


def test_a_board_of_boards_ends(tmp_path: Path) -> None:
    panel: dict[str, Any] = {"targets": [{"expr": "x{"}]}
    for _ in range(150):
        panel = {"panels": [panel, panel["targets"] and {"targets": []}], "targets": [{}]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"panels": [panel] * 100}))
    (report,) = check([path], None)
    assert any("more than 2000 panels" in finding.message for finding in report.findings)


def test_control_characters_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"panels": [{"title": "\x1b[2Jp", "targets": [{"expr": "("}]}]}))
    shown = dashboards("check", str(path))
    assert shown.returncode == 1
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize("page", ["", "<html>", "{}", 'a{b="c} 1', "a b c d"])
def test_a_page_without_metrics_is_told(page: str) -> None:
    with pytest.raises(InputError, match="shows no metrics"):
        Scrape(page, "it")


def test_where_there_is_nothing_to_ask_is_exit_2(tmp_path: Path) -> None:
    for metrics in ("http://127.0.0.1:1", "ftp://x/y", str(tmp_path / "gone")):
        ended = dashboards("check", "--metrics", metrics)
        assert ended.returncode == 2
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert ended.stderr.startswith("dsagent: ")
    with pytest.raises(InputError):
        connect("http://127.0.0.1:1/metrics")


def test_json_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"panels": [{"title": "p", "targets": [{"expr": "vllm:tokens_total"}]}]}')
    ended = dashboards("check", "--json", str(path))
    assert ended.returncode == 1
    document = json.loads(ended.stdout)
    (error,) = document["errors"]
    assert (error["path"], error["where"], error["problem"]) == (str(path), "p", "renamed")
    (file,) = document["files"]
    assert (file["path"], file["expressions"], file["alive"]) == (str(path), 1, 0)


def test_a_clean_check_and_generate_end_with_0(tmp_path: Path) -> None:
    made = dashboards("generate", str(tmp_path), "--json")
    assert made.returncode == 0, made.stderr
    assert len(json.loads(made.stdout)["files"]) == len(list(tmp_path.glob("*.json"))) >= 8
    assert dashboards("check", str(tmp_path)).returncode == 0


def test_wrong_use_is_one_line_and_exit_2() -> None:
    ended = dashboards("chekc")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)


class _Server(BaseHTTPRequestHandler):
    """As Prometheus answers, until it is asked to evaluate a panel's query: then it hangs up."""

    def do_GET(self) -> None:
        self._answer({"status": "success", "data": ["vllm:num_requests_running"]})

    def do_POST(self) -> None:
        query = self.rfile.read(int(self.headers["Content-Length"]))
        if b"__name__" in query:
            series = {"metric": {"engine": "0"}, "value": [0, "1"]}
            self._answer({"status": "success", "data": {"result": [series]}})
        self.close_connection = True

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing."""


def test_a_server_that_goes_away_is_no_dead_panel(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"panels": [{"targets": [{"expr": "vllm:num_requests_running"}]}]}')
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        known = connect(f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(InputError, match="does not answer"):
            check([path], known)
        server.shutdown()


def test_what_would_take_for_ever_is_left_to_the_server(tmp_path: Path) -> None:
    page = 'x{a="' + "a" * 900 + '"} 1\n'
    exprs = ['x{a=~"(a+)+b"}', 'x{a=~"a*a*a*a*a*b"}', "$x" * 2_000_000, '"' * 99_999]
    variables = [{"name": "v", "type": "query", "query": "label_values(" + ", " * 999_999}]
    board = {
        "panels": [{"targets": [{"expr": expr}]} for expr in exprs],
        "templating": {"list": variables},
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(board))
    (report,) = check([path], Scrape(page, "it"))
    assert [finding.problem for finding in report.findings] == ["syntax", "syntax"]
    assert len(json.dumps([finding.to_json() for finding in report.findings])) < 300_000

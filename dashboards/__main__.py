"""`python -m dsagent.dashboards generate|check`; `dsagent dashboards` starts it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from dsagent.dashboards.doctor.findings import InputError

FINDINGS, USAGE = 1, 2
GENERATED = Path(__file__).resolve().parent / "generated"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(message, USAGE)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"dsagent: {message}\n")
    sys.exit(code)


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = _Parser("dsagent dashboards", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate|check")
    generate = commands.add_parser("generate", help="write the boards")
    generate.add_argument("files", nargs="?", type=Path, default=GENERATED, metavar="FOLDER")
    check = commands.add_parser("check", help="look for what is dead, renamed or cannot work")
    check.add_argument("files", nargs="*", type=Path, metavar="FILE")
    check.add_argument("--metrics", metavar="URL", action="append", default=[])
    for each in (generate, check):
        each.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "generate":
            return _generate(arguments.files, arguments.json)
        return _check(arguments.files, arguments.metrics, arguments.json)
    except InputError as error:
        _fail(str(error), USAGE)
    except ModuleNotFoundError as error:
        if (error.name or "dsagent").startswith("dsagent"):
            raise
        _fail(f"this needs the package {error.name}: pip install 'dsagent[dashboards]'", FINDINGS)


def _generate(folder: Path, as_json: bool) -> int:
    from dsagent.dashboards.generate import write

    try:
        paths = write(folder)
    except (FileExistsError, NotADirectoryError):
        _fail(f"{folder}: not a folder", USAGE)
    except OSError as error:
        _fail(f"cannot write {error.filename or folder}: {error.strerror}", FINDINGS)
    if as_json:
        _put(_as_json({"errors": [], "files": [{"path": str(path)} for path in paths]}))
    else:
        _put(f"{len(paths)} boards in {folder}")
    return 0


def _check(files: list[Path], metrics: list[str], as_json: bool) -> int:
    from dsagent.dashboards.doctor.check import check
    from dsagent.dashboards.doctor.files import below
    from dsagent.dashboards.doctor.known import connect, joined
    from dsagent.dashboards.doctor.show import show

    known = joined([connect(each) for each in metrics]) if metrics else None
    paths = below(files or [GENERATED])
    reports = check(paths, known)
    findings = [finding for report in reports for finding in report.findings]
    if as_json:
        document = {
            "errors": [finding.to_json() for finding in findings],
            "files": [report.to_json() for report in reports],
        }
        _put(_as_json(document))
    else:
        _put(show(reports, known.what if known else None))
    return FINDINGS if findings else 0


def _put(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains as it ends
        _fail(f"cannot write the result: {error.strerror}", FINDINGS)


def _as_json(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())

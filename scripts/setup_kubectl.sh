#!/usr/bin/env bash
# Finds a kubectl that knows native sidecars and --custom profiles, or unpacks Debian 13's beside the
# system, under build/kubectl: nothing is installed. Prints its path. apt checks the signatures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly OLDEST=1.32
readonly FOLDER=$PWD/build/kubectl
source scripts/debian13.sh

say() { printf 'setup: %s\n' "$*" >&2; }

# new_enough PROGRAM: whether it is a kubectl of OLDEST or later.
new_enough() {
    local version
    version=$("$1" version --client 2>/dev/null | sed -n 's/^Client Version: v\([0-9]*\.[0-9]*\).*/\1/p')
    [[ -n $version && $(printf '%s\n' "$OLDEST" "$version" | sort -V | head -n 1) == "$OLDEST" ]]
}

for candidate in "$(command -v kubectl || true)" "$FOLDER/usr/bin/kubectl"; do
    if [[ -n $candidate ]] && new_enough "$candidate"; then
        printf '%s\n' "$candidate"
        exit 0
    fi
done

unpack_debian13 kubectl "$FOLDER" >&2 || {
    say "no kubectl of at least $OLDEST, and no Debian to take one from: install kubectl by hand"
    exit 1
}
new_enough "$FOLDER/usr/bin/kubectl" || { say "what was unpacked is no kubectl of at least $OLDEST"; exit 1; }
printf '%s\n' "$FOLDER/usr/bin/kubectl"

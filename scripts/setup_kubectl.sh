#!/usr/bin/env bash
# Finds a kubectl that knows native sidecars and --custom profiles, or unpacks Debian 13's beside the
# system, under build/kubectl: nothing is installed. Prints its path. apt checks the signatures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly OLDEST=1.32
readonly FOLDER=$PWD/build/kubectl
readonly KEYS=/usr/share/keyrings/debian-archive-keyring.gpg

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

# The mirror that this machine uses already; the suites with a dash in their names are additions to it.
mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
    sed -n 's/^[a-z]* \(.*debian\/\?\)$/\1/p' | head -n 1) || true
if [[ -z $mirror || ! -r $KEYS ]]; then
    say "no kubectl of at least $OLDEST, and no Debian to take one from: install kubectl by hand"
    exit 1
fi

rm -rf "$FOLDER"
mkdir -p "$FOLDER"/apt/{lists,archives}/partial
printf 'deb [signed-by=%s] %s trixie main\n' "$KEYS" "$mirror" >"$FOLDER/apt/sources.list"
options=(-q -o "Dir::Etc::SourceList=$FOLDER/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
         -o "Dir::State::Lists=$FOLDER/apt/lists" -o Dir::State::Status=/dev/null
         -o "Dir::Cache=$FOLDER/apt" -o APT::Sandbox::User=root)
{
    apt-get "${options[@]}" update
    cd "$FOLDER"
    apt-get "${options[@]}" download kubectl
    dpkg -x kubectl_*.deb .
    rm -rf apt ./*.deb
} >&2
new_enough "$FOLDER/usr/bin/kubectl" || { say "what was unpacked is no kubectl of at least $OLDEST"; exit 1; }
printf '%s\n' "$FOLDER/usr/bin/kubectl"

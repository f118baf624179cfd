#!/bin/bash
# What `make setup` runs: the pinned packages into VENV, the JPEG kernel, and .venv as a link to a VENV that is elsewhere.
# Usage: scripts/setup.sh VENV PYTHON    (docs/install.md)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 python=$2
pythons='3.11 3.12 3.13 3.14' # those for which all pinned packages have wheels

fail() {
    echo "error: $*" >&2
    exit 2
}

# One that is here and would do, as the flag to say.
propose() {
    local minor
    for minor in 14 13 12 11; do
        if "python3.$minor" -c "" 2>/dev/null; then # the shim of a version manager may not run
            echo "make setup PYTHON=python3.$minor"
            return
        fi
    done
    echo "make setup PYTHON=/path/to/python3.12 (many clusters: module load python, or conda)"
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "$python cannot be run here; name another Python: $(propose)"
[[ " $pythons " == *" $version "* ]] ||
    fail "$python is Python $version, and the pinned packages need one of $pythons: $(propose)"

if [[ $venv == .venv && -L .venv && ! -e .venv ]]; then
    fail ".venv is a link to $(readlink .venv), which is gone; name a folder again: make setup VENV=/a/larger/disk/trainyard"
fi

# Nothing to install: made before from these pins, or by somebody else for all.
is_ready() {
    [[ -e $venv/.done ]] && { [[ ! -w $venv ]] || [[ ! requirements.txt -nt $venv/.done && ! requirements-dev.txt -nt $venv/.done ]]; }
}

flags=()
if [[ $venv != .venv && ! $venv -ef .venv ]]; then
    [[ $venv == /* ]] || venv=$PWD/$venv
    [[ ! -d .venv || -L .venv ]] || fail ".venv is here already, and would hide $venv; remove it first: make clean"
    flags=(--no-cache-dir) # such a VENV is for a small quota: pip shall leave nothing in the home folder
fi
[[ ! -L .venv ]] || flags=(--no-cache-dir)
if ! is_ready; then
    if [[ -x $venv/bin/python ]]; then
        made=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo broken)
        [[ $made == "$version" ]] || fail "$venv is an environment of Python $made, not $version; remove it first: make clean"
    fi
    mkdir -p "$venv/tmp" # nor fill /tmp: it unpacks gigabytes
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" ||
        fail "$python cannot make an environment (on Debian: apt install python3-venv)"
    TMPDIR=$(cd "$venv/tmp" && pwd) "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        ${flags[@]+"${flags[@]}"} -r requirements-dev.txt ||
        fail "the packages were not installed; where the disk or your quota is full: make setup VENV=/a/larger/disk/trainyard"
    rm -rf "$venv/tmp"
    touch "$venv/.done"
fi
[[ $venv -ef .venv ]] || ln -sfn "$venv" .venv
.venv/bin/python -m train.data.jpeg
touch train/data/jpeg_crop.built

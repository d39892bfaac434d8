#!/usr/bin/env bash
# Installs the gateways that bench.cpu compares with, each pinned and in a place of its own, from PyPI and npm. What
# cannot be had is left out, with the reason in its log; the benchmark then says so and goes on without it.
set -uo pipefail
PEERS="${FAIRGATE_PEERS:-$HOME/.cache/fairgate/peers}"
PYTHON="${PYTHON:-python3}"
mkdir -p "$PEERS"

# python NAME VERSION PACKAGE...: into a virtual environment
python() {
    local name=$1 version=$2 home="$PEERS/$1"; shift 2
    [ "$(cat "$home/.installed" 2>/dev/null)" = "$version" ] && { echo "$name $version: installed"; return; }
    rm -rf "$home"
    if "$PYTHON" -m venv "$home" >"$PEERS/$name.log" 2>&1 \
        && "$home/bin/pip" install --quiet --disable-pip-version-check "$@" >>"$PEERS/$name.log" 2>&1; then
        echo "$version" >"$home/.installed"; echo "$name $version: installed"
    else
        echo "$name $version: left out, see $PEERS/$name.log: $(tail -n 1 "$PEERS/$name.log")"
    fi
}

# node NAME VERSION PACKAGE: into a directory
node() {
    local name=$1 version=$2 home="$PEERS/$1"
    [ "$(cat "$home/.installed" 2>/dev/null)" = "$version" ] && { echo "$name $version: installed"; return; }
    rm -rf "$home"; mkdir -p "$home"
    if npm install --silent --no-audit --no-fund --prefix "$home" "$3" >"$PEERS/$name.log" 2>&1; then
        echo "$version" >"$home/.installed"; echo "$name $version: installed"
    else
        echo "$name $version: left out, see $PEERS/$name.log: $(tail -n 1 "$PEERS/$name.log")"
    fi
}

python vllm-router 0.1.17 "vllm-router==0.1.17"
python sglang-router 0.3.2 "sglang-router==0.3.2"
python litellm 1.105.2 "litellm[proxy]==1.105.2"
node portkey 1.15.2 "@portkey-ai/gateway@1.15.2"

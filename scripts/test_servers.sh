#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs missing programs that tests start, where that needs no password.
set -uo pipefail

VENV=${VENV:-.venv}
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)

install() {
    command -v apt-get >/dev/null || return
    echo "installing $1 for the tests"
    "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null
}

# Without Ray, the tests of Ray Serve are skipped.
if [ -x "$VENV/bin/python" ] && ! "$VENV/bin/python" -c 'import ray.serve' 2>/dev/null; then
    echo "installing Ray for the tests"
    "$VENV/bin/python" -m pip install -q -e '.[ray]' || echo "Ray can't be installed: the tests of Ray Serve will be skipped"
fi

if ! command -v redis-server >/dev/null && ! command -v valkey-server >/dev/null; then
    install redis-server || echo "redis-server is not installed: tests of the Redis registry will be skipped"
fi
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
    install chromium || echo "Chromium is not installed: tests of the web page will be skipped"
fi

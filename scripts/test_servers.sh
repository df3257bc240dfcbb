#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the servers that tests start by themselves, where this machine lacks them and it can be done without asking.
set -euo pipefail

if command -v redis-server >/dev/null || command -v valkey-server >/dev/null; then
    exit 0
fi
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
    echo "installing redis-server for the tests"
    "${as_root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends redis-server >/dev/null
else
    echo "redis-server is not installed: the tests of the registry in Redis will be skipped"
fi

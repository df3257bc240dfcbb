# SPDX-License-Identifier: Apache-2.0
# For scripts/containers.sh: Docker's API, served by Podman until the script that sources this file ends.

CONFIGURATION=$PWD/build/podman # containers that are restarted later need it, too
export CONTAINERS_CONF=$CONFIGURATION/containers.conf DOCKER_HOST
DOCKER_HOST=unix://$(mktemp --dry-run --tmpdir podman-XXXXXX.sock)

# This machine's pip settings, for builds and for servers that download a model. Those of the environment come first.
# The Dockerfile names torch's index, too; where it is out of reach, each package would be looked for there five times.
pip_settings() {
    printf '[global]\nretries = 1\n'
    python3 -m pip config list | sed -nE "s/^(:env:|global)\.+([a-z-]+)='(.*)'$/\2 = \3/p" | awk '$1 != "retries" && !seen[$1]++'
}

# Files and folders that they name; an index file:///FOLDER/simple links to files beside it.
pip_files() {
    grep -oE '(file://)?/[^ ]+' "$CONFIGURATION/pip.conf" | sed -E 's|^file://(.*)/.*|\1|' | sort -u \
        | while read -r path; do [[ ! -e $path ]] || echo "$path"; done
}

# Builds use this machine's network, whose name servers a bridge may not reach; Compose names a service's. Not every root
# user may raise limits, so containers get those of this shell.
settings() {
    cat <<SETTINGS
[containers]
netns = "host"
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=4096:4096"]
volumes = ["$CONFIGURATION/pip.conf:/etc/pip.conf:ro"$(pip_files | sed 's/.*/, "&:&:ro"/' | tr -d '\n')]
SETTINGS
}

# Podman leaves health checks to systemd's timers; this replaces them where systemd is not running.
check_health() {
    while sleep 5; do
        podman ps --quiet | xargs --no-run-if-empty --max-args 1 podman healthcheck run || true # unhealthy
    done
}

# Services of compose.yaml without those whose image is neither built here, nor to be pulled, nor has a stand-in.
available_services() {
    scripts/stand_in.sh "$(sed -n 's/^ARG BASE=//p' "docker/$COMPOSE_PROFILES.Dockerfile")"
    "${COMPOSE[@]}" config --format json | python3 -c 'import json, sys
for name, service in json.load(sys.stdin)["services"].items(): print(name, service["image"])' \
        | while read -r service image; do
            if [[ $image == tessera:* ]] || scripts/stand_in.sh "$image"; then
                echo "$service"
            else
                say "$service is left out: no image $image"
            fi
        done
}

mkdir -p "$CONFIGURATION"
pip_settings >"$CONFIGURATION/pip.conf"
settings >"$CONTAINERS_CONF"
podman system service --time 0 "$DOCKER_HOST" 2>"$CONFIGURATION/service.log" &
[[ -d /run/systemd/system ]] || check_health >/dev/null 2>&1 &
trap 'kill $(jobs -p)' EXIT

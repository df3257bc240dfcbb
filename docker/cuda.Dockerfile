# SPDX-License-Identifier: Apache-2.0
# Tessera on NVIDIA GPUs. BASE is the vLLM project's image of the extra "cuda"'s version, with its torch and CUDA.
#
#   docker build -f docker/cuda.Dockerfile -t tessera:cuda .
#
# Not built or run yet: docs/status.md.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE} AS package
COPY . /src
RUN uv build --wheel --out-dir /dist /src

FROM ${BASE} AS installed
# uv, as in vLLM's documentation: the image has vLLM in the system's Python. Without the code, so that another version
# of it does not install everything again.
COPY pyproject.toml README.md LICENSE /src/
RUN uv pip install --system --break-system-packages --no-cache "/src[cuda]"
COPY --from=package /dist /dist
RUN uv pip install --system --break-system-packages --no-cache --no-deps --reinstall /dist/*.whl

FROM installed AS listed
COPY scripts/audit-requirements.txt /src/
RUN uv venv /tmp/audit \
    && uv pip install --python /tmp/audit --no-cache --requirement /src/audit-requirements.txt \
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

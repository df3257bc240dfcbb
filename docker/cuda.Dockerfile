# SPDX-License-Identifier: Apache-2.0
# Tessera on NVIDIA GPUs. BASE is the vLLM project's image of the extra "cuda"'s version, with its torch and CUDA.
#
#   docker build -f docker/cuda.Dockerfile -t tessera:cuda .
#
# Not built or run yet: docs/status.md.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}

WORKDIR /opt/tessera
COPY . .
# uv, as in vLLM's documentation: the image has vLLM in the system's Python.
RUN uv pip install --system --break-system-packages --no-cache ".[cuda]"

RUN useradd --uid 10001 --create-home tessera && install -d -o tessera -g tessera /models
ENV HF_HOME=/models
USER 10001
WORKDIR /home/tessera

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python3", "/opt/tessera/docker/health.py", "8000"]
ENTRYPOINT ["tessera"]
CMD ["serve", "--host", "0.0.0.0"]

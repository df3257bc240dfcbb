# SPDX-License-Identifier: Apache-2.0
# Tessera on Ascend NPUs. BASE is the vLLM-Ascend project's image: it has vLLM 0.23.0 built for no device (its wheel would
# want another torch), vllm-ascend 0.23.0.post1, torch-npu, Triton-Ascend and CANN. Name it with the registry you get it from.
#
#   docker build -f docker/ascend.Dockerfile --build-arg BASE=... -t tessera:ascend .
#
# Not built or run yet: docs/status.md.
ARG BASE=ascend/vllm-ascend:v0.23.0.post1
FROM ${BASE}

WORKDIR /opt/tessera
COPY pyproject.toml README.md ./
COPY app app
COPY benchmarks benchmarks
COPY cache cache
COPY engine_ext engine_ext
COPY evaluation evaluation
COPY kernels kernels
COPY models models
COPY scripts scripts
RUN pip install --no-cache-dir ".[ascend]"

EXPOSE 8000
ENTRYPOINT ["tessera", "serve", "--host", "0.0.0.0"]

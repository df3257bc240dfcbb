# SPDX-License-Identifier: Apache-2.0
# Tessera on Ascend NPUs. BASE is the vLLM-Ascend project's image, including your registry: vLLM 0.23.0 built without a
# device (its wheel requires another torch), vllm-ascend 0.23.0.post1, torch-npu, Triton-Ascend and CANN.
#
#   docker build -f docker/ascend.Dockerfile --build-arg BASE=... -t tessera:ascend .
#
# Not built or run yet: docs/status.md.
ARG BASE=ascend/vllm-ascend:v0.23.0.post1
FROM ${BASE}

WORKDIR /opt/tessera
COPY . .
RUN pip install --no-cache-dir ".[ascend]"

RUN useradd --uid 10001 --create-home tessera && install -d -o tessera -g tessera /models
ENV HF_HOME=/models
USER 10001
WORKDIR /home/tessera

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python3", "/opt/tessera/docker/health.py", "8000"]
# CANN's image sets its compilers' paths in /etc/profile.
ENTRYPOINT ["/bin/bash", "-c", "source /etc/profile && exec tessera \"$@\"", "tessera"]
CMD ["serve", "--host", "0.0.0.0"]

# SPDX-License-Identifier: Apache-2.0
# Tessera on Ascend NPUs. BASE is the vLLM-Ascend project's image, including your registry: vLLM 0.23.0 built without a
# device (its wheel requires another torch), vllm-ascend 0.23.0.post1, torch-npu, Triton-Ascend and CANN.
#
#   docker build -f docker/ascend.Dockerfile --build-arg BASE=... -t tessera:ascend .
#
# Not built or run yet: docs/status.md.
ARG BASE=ascend/vllm-ascend:v0.23.0.post1
FROM ${BASE} AS package
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist /src

FROM ${BASE} AS installed
# Without the code, so that another version of it does not install everything again.
COPY pyproject.toml README.md LICENSE /src/
RUN pip install --no-cache-dir "/src[ascend]"
COPY --from=package /dist /dist
RUN pip install --no-cache-dir --no-deps --force-reinstall /dist/*.whl

FROM installed AS listed
COPY scripts/audit-requirements.txt /src/
RUN python3 -m venv /tmp/audit \
    && /tmp/audit/bin/pip install --no-cache-dir --requirement /src/audit-requirements.txt \
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
# CANN's image sets its compilers' paths in /etc/profile.
ENTRYPOINT ["/bin/bash", "-c", "source /etc/profile && exec tessera \"$@\"", "tessera"]
CMD ["serve", "--host", "0.0.0.0"]

# The logsteer server, as two targets that differ in their base and their locked packages:
#
#   docker build --target cpu --tag logsteer:cpu .     x86-64 with AVX2 or better, no GPU
#   docker build --target cuda --tag logsteer:cuda .   NVIDIA GPU, driver 580 or later (CUDA 13)
#   docker run --rm --publish 127.0.0.1:8000:8000 --env LOGSTEER_INSECURE=true --stop-timeout 75 logsteer:cpu
#
# Configuration: mount a file over /etc/logsteer/models.yaml. Secrets: LOGSTEER_API_KEY, HF_TOKEN.
# In a container the server listens on every address, and does not start without a key unless
# LOGSTEER_INSECURE says that something else, here the published address, keeps strangers out.
# docker-compose.yml holds the settings that a production container wants besides.
#
# It takes BuildKit (Docker 23 or later; 25 for the health check). What a build may be given:
#
#   --build-arg PYTHON_BASE=… CUDA_BASE=…    other bases, from a registry of your own for example
#   --build-context wheels=FOLDER            wheels that no index has
#   --secret id=ca,src=FILE                  certificate authorities that package indexes are signed by
#   --secret id=pip_conf,src=FILE            how pip reaches them
#   --secret id=uv_toml,src=FILE             how uv reaches them; none of the last four is in a layer
#   --target sbom-cpu --output FOLDER        what the image consists of, as sbom.cdx.json (CycloneDX)
#   --target ray                             the cpu target with Ray, for deploy/ray; with
#                                            --build-arg VARIANT=cuda the other one
#
# `make test-containers` builds and runs the cpu target. deploy/README.md says what has been run:
# the cpu target on a base of Debian's packages; of the cuda target, only that its lock installs.

ARG PYTHON_BASE=python:3.11.15-slim-bookworm
ARG CUDA_BASE=nvidia/cuda:13.0.3-base-ubuntu24.04
ARG VARIANT=cpu
ARG VERSION=0.1.0
ARG REVISION=unknown

# Empty, unless --build-context wheels=FOLDER takes its place.
FROM scratch AS wheels

FROM ${PYTHON_BASE} AS python
# The official image has its standard library without bytecode, which the user of the container could
# not write later: each process would compile what it imports.
RUN python -m compileall -q -x '/(test|idlelib|lib2to3|site-packages|dist-packages)/' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

# ---------------------------------------------------------------- operating systems

FROM python AS os-cpu
# g++ compiles kernels when a model is loaded with `compile: true`; vLLM's CPU kernels link libnuma.
# Package versions stay open because Debian removes superseded ones from its mirrors.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && groupadd --gid 10001 logsteer \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/logsteer --shell /usr/sbin/nologin logsteer \
    && install --directory --owner 10001 --group 10001 /var/lib/logsteer

FROM ${CUDA_BASE} AS os-cuda
# The interpreter is the cpu target's own, so that both images run one Python, headers included,
# which Triton compiles against; the lib* packages are what its standard library links.
COPY --from=python /usr/local/ /usr/local/
# The `base` flavour has no CUDA libraries, because torch's wheels bring them. vLLM's kernels are
# partly compiled on first use (Triton, FlashInfer, DeepGEMM): that takes nvcc, g++ and headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates \
        cuda-cudart-dev-13-0 \
        cuda-cuobjdump-13-0 \
        cuda-nvcc-13-0 \
        cuda-nvrtc-dev-13-0 \
        g++ \
        libbz2-1.0 \
        libcublas-dev-13-0 \
        libcurand-dev-13-0 \
        libffi8 \
        liblzma5 \
        libnuma1 \
        libsqlite3-0 \
        libssl3t64 \
        zlib1g \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && ldconfig \
    && groupadd --gid 10001 logsteer \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/logsteer --shell /usr/sbin/nologin logsteer \
    && install --directory --owner 10001 --group 10001 /var/lib/logsteer

# ---------------------------------------------------------------- installed packages
# deploy/image/install.sh says what is mounted, and why the project's own packages are empty here.

FROM os-cpu AS build-cpu
ARG VERSION
WORKDIR /srv/logsteer
COPY requirements/install.sh requirements/cpu.lock requirements/
COPY pyproject.toml LICENSE ./
COPY server/pyproject.toml server/
COPY deploy/image/install.sh deploy/image/
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=uv_toml,target=/etc/uv/uv.toml \
    VENV=/opt/logsteer LOGSTEER_VARIANT=cpu deploy/image/install.sh
COPY deploy/image/slim.sh deploy/image/sbom.py deploy/image/
RUN VENV=/opt/logsteer LOGSTEER_VARIANT=cpu deploy/image/slim.sh \
    && /opt/logsteer/bin/python deploy/image/sbom.py "$VERSION" > sbom.cdx.json

# The same document alone: --target sbom-cpu --output FOLDER.
FROM scratch AS sbom-cpu
COPY --from=build-cpu /srv/logsteer/sbom.cdx.json /

FROM os-cuda AS build-cuda
ARG VERSION
WORKDIR /srv/logsteer
COPY requirements/install.sh requirements/cuda.lock requirements/
COPY pyproject.toml LICENSE ./
COPY server/pyproject.toml server/
COPY deploy/image/install.sh deploy/image/
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=uv_toml,target=/etc/uv/uv.toml \
    VENV=/opt/logsteer LOGSTEER_VARIANT=cuda deploy/image/install.sh
COPY deploy/image/slim.sh deploy/image/sbom.py deploy/image/
RUN VENV=/opt/logsteer LOGSTEER_VARIANT=cuda deploy/image/slim.sh \
    && /opt/logsteer/bin/python deploy/image/sbom.py "$VERSION" > sbom.cdx.json

# The same document alone: --target sbom-cuda --output FOLDER.
FROM scratch AS sbom-cuda
COPY --from=build-cuda /srv/logsteer/sbom.cdx.json /

# ---------------------------------------------------------------- the project's own files

FROM python AS files
COPY LICENSE /srv/logsteer/LICENSE
COPY client/logsteer /srv/logsteer/client/logsteer
COPY server/logsteer_server /srv/logsteer/server/logsteer_server
COPY demo/model /srv/logsteer/demo/model
COPY deploy/models.cpu.yaml /etc/logsteer/models.yaml
# Modes come from the checkout, where a strict umask would leave files that only root can read.
RUN chmod -R u=rwX,go=rX /srv/logsteer /etc/logsteer \
    && python -m compileall -q /srv/logsteer/client /srv/logsteer/server

# ---------------------------------------------------------------- targets
# Both end in the same lines; tests/server/test_deployment.py fails where they differ.
#
# Shutdown: the entry point is the server itself, without a shell in between, so SIGTERM reaches it.
# It refuses new requests, gives open ones drain_s (30 s) and each engine process up to 30 s, and
# exits. That is longer than the 10 s after which Docker kills by default: give --stop-timeout.
#
# Health: /readyz says what is known of every engine and asks none, so a busy one does not delay it,
# and one that hangs counts as ready until heartbeat_timeout_s is over. The start period
# leaves time to download and compile a model; the first success ends it. http.client is used because
# it ignores proxy variables.

FROM os-cuda AS cuda
COPY --from=build-cuda /opt/logsteer /opt/logsteer
COPY --from=build-cuda /srv/logsteer/sbom.cdx.json /srv/logsteer/sbom.cdx.json
COPY --from=files /srv/logsteer /srv/logsteer
COPY --from=files /etc/logsteer /etc/logsteer
ENV PATH=/opt/logsteer/bin:$PATH \
    HOME=/var/lib/logsteer \
    HF_HOME=/var/lib/logsteer/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /srv/logsteer
USER 10001:10001
VOLUME ["/var/lib/logsteer"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=40s --start-period=30m --start-interval=10s --retries=3 \
    CMD ["python", "-c", "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=35); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["logsteer-server"]
CMD ["--config", "/etc/logsteer/models.yaml", "--host", "0.0.0.0", "--port", "8000"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="logsteer" \
      org.opencontainers.image.description="Exact log-probabilities and perplexities from language models, over HTTP; CUDA 13" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      logsteer.sbom="/srv/logsteer/sbom.cdx.json"

FROM os-cpu AS cpu
COPY --from=build-cpu /opt/logsteer /opt/logsteer
COPY --from=build-cpu /srv/logsteer/sbom.cdx.json /srv/logsteer/sbom.cdx.json
COPY --from=files /srv/logsteer /srv/logsteer
COPY --from=files /etc/logsteer /etc/logsteer
ENV PATH=/opt/logsteer/bin:$PATH \
    HOME=/var/lib/logsteer \
    HF_HOME=/var/lib/logsteer/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /srv/logsteer
USER 10001:10001
VOLUME ["/var/lib/logsteer"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=40s --start-period=30m --start-interval=10s --retries=3 \
    CMD ["python", "-c", "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=35); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["logsteer-server"]
CMD ["--config", "/etc/logsteer/models.yaml", "--host", "0.0.0.0", "--port", "8000"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="logsteer" \
      org.opencontainers.image.description="Exact log-probabilities and perplexities from language models, over HTTP; CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      logsteer.sbom="/srv/logsteer/sbom.cdx.json"

# ---------------------------------------------------------------- Ray
# Either target with the extra `ray`, in one more layer: a node of a cluster with the command
# `ray start …`, and a whole cluster of this machine without a command.

# hadolint ignore=DL3006
FROM build-${VARIANT} AS build-ray
ARG VARIANT
ARG VERSION
WORKDIR /srv/logsteer
COPY requirements/cpu.lock requirements/cuda.lock requirements/dev.lock requirements/
COPY deploy/image/ray.sh deploy/image/
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=uv_toml,target=/etc/uv/uv.toml \
    VENV=/opt/logsteer LOGSTEER_VARIANT=$VARIANT ADDED=/opt/added deploy/image/ray.sh \
    && /opt/logsteer/bin/python deploy/image/sbom.py "$VERSION" > sbom.cdx.json \
    && install --directory /opt/state

# hadolint ignore=DL3006
FROM ${VARIANT} AS ray
COPY --from=build-ray /opt/added/ /opt/logsteer/
# What the head of a cluster keeps, see deploy/ray/compose.yml: a volume takes this one's owner.
COPY --from=build-ray --chown=10001:10001 /opt/state /var/lib/ray
COPY --from=build-ray /srv/logsteer/sbom.cdx.json /srv/logsteer/sbom.cdx.json
COPY --chmod=755 deploy/ray/local.sh /srv/logsteer/
ENV RAY_USAGE_STATS_ENABLED=0 LOGSTEER_HOST=0.0.0.0
ENTRYPOINT []
CMD ["/srv/logsteer/local.sh", "/etc/logsteer/models.yaml"]
LABEL org.opencontainers.image.description="Exact log-probabilities and perplexities from language models, over HTTP; a node of a Ray cluster"

# What a build without --target gives.
FROM cpu

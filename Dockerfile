# Two images: `--target cuda` (the default) for hosts with and without a GPU, as the torch wheel of PyPI carries CUDA and
# runs on CPUs too; `--target cpu` without CUDA, a fifth of the size.
#
#     docker build --target cpu --tag teimgr:cpu .

# The compiler of the attention kernel stays out of the images.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/teimgr
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="teimgr" \
      org.opencontainers.image.description="One daemon for a fleet of embedding and reranking models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

RUN useradd --create-home --uid 1000 teimgr \
    && mkdir -p /data/state /data/logs /data/models \
    && chown -R teimgr /data
COPY configs/container.toml /etc/teimgr/teimgr.toml

ENV HF_HOME=/data/models PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 9000 9001 8080-8180

# Alive, whatever the models do; /readyz is whether all wanted ones serve. Port 9002 is `health_port` of the configuration.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s --start-interval=1s \
    CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:9002/livez', timeout=4)"

STOPSIGNAL SIGTERM
ENTRYPOINT ["teimgr", "serve"]
CMD ["-c", "/etc/teimgr/teimgr.toml"]

FROM base AS cpu
# The exact torch of pyproject.toml, from PyTorch's index of CPU wheels; then the rest finds it there.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /opt/teimgr/pyproject.toml /tmp/pyproject.toml
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "$(grep -o 'torch==[0-9.]*' /tmp/pyproject.toml)" \
    && pip install --no-cache-dir "$(ls /wheels/*.whl)[otel]"
USER teimgr

FROM base AS cuda
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[otel]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER teimgr

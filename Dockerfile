# One image for hosts with and without a GPU: the pinned torch wheel from PyPI carries CUDA and runs on CPUs too.

# The compiler of the attention kernel stays out of the image.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/teimgr
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim

RUN useradd --create-home --uid 1000 teimgr \
    && mkdir -p /data/state /data/logs /data/models \
    && chown -R teimgr /data

COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
COPY configs/container.toml /etc/teimgr/teimgr.toml

USER teimgr
ENV HF_HOME=/data/models PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 9000 9001 8080-8180

HEALTHCHECK --interval=30s --timeout=5s --start-period=20s \
    CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:9000/health', timeout=4)"

STOPSIGNAL SIGTERM
ENTRYPOINT ["teimgr", "serve"]
CMD ["-c", "/etc/teimgr/teimgr.toml"]

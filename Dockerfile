# docker build -t project .
# docker run --gpus all project --precision 16-mixed
# docker run --gpus all --ipc=host --user "$(id -u):$(id -g)" \
#   -v "$PWD/checkpoints:/app/checkpoints" -v "$PWD/data:/app/data" project --devices 2
# docker run --entrypoint python project -m project.devices
#
# The base may be any Debian with Python 3.11 to 3.14, its venv module and its headers. PyTorch's
# wheels bring their own CUDA libraries.
ARG BASE=python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

# torch.compile builds its kernels with a C++ compiler. The base's release decides the version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# Packages are installed before the code is copied, so that an edit of the code rebuilds only the
# last small layers.
WORKDIR /app
COPY requirements.lock ./
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY unbroken unbroken
RUN /opt/venv/bin/pip install --no-deps --no-build-isolation -e ./unbroken

# With any `docker run --user ID`, the user has a name, a folder for caches, and may write into the
# two folders below.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=trainer \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN install --directory --mode=1777 checkpoints data
COPY LICENSE ./
COPY configs configs
COPY project project

USER 1000:1000
VOLUME ["/app/checkpoints", "/app/data"]
ENTRYPOINT ["python", "-m", "project.fit"]

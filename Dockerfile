# An image for training and one for serving: docs/docker.md says how to build and to run them.
#
#   docker build --tag spmd-serve .
#   docker build --tag spmd-train --target train --build-arg ACCELERATOR=cuda .

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS train
ARG ACCELERATOR=cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /opt/spmd

# What decides the environment comes first, so that other changes of the sources install nothing anew.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts/_env.sh scripts/
COPY spmd/__init__.py spmd/
RUN source scripts/_env.sh; \
    setup_env train; \
    setup_env serve; \
    setup_env otlp; \
    case "$ACCELERATOR" in \
      cpu) ;; \
      cuda | tpu) setup_env "$ACCELERATOR" ;; \
      *) die "ACCELERATOR is $ACCELERATOR, not one of cpu, cuda, tpu" ;; \
    esac

COPY . .
RUN .venv/bin/python -m compileall -q spmd models serving pytorch scripts; \
    useradd --uid 1000 --create-home spmd
ENV PATH="/opt/spmd/.venv/bin:$PATH"
USER 1000
CMD ["python", "scripts/train_llama.py", "--help"]

FROM train AS serve
EXPOSE 8000
# It answers 503 until the model is loaded and compiled, which takes minutes for a large one.
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s --retries=3 CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["scripts/serve", "--host", "0.0.0.0"]
CMD ["/bundle"]

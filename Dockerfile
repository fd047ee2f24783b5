# One image for all roles: docker run shardline ps|worker|chief|evaluator. Built with BuildKit, as `docker compose` does.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# cpu or cuda: the build of torch that must come out.
ARG TORCH=cpu
# The index that has that build. Empty: PyTorch's own for cpu, unless pip's settings name a place or a wheel of it lies in
# wheelhouse/; Python's public index has the CUDA build for most machines.
ARG TORCH_INDEX_URL=
# pip reads these as it reads the environment.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG PIP_DEFAULT_TIMEOUT
ARG PIP_RETRIES
# Extras of pyproject.toml: what the examples import.
ARG EXTRAS=examples
RUN python3 -m venv /opt/venv
COPY constraints.txt /src/
# A layer of its own: torch is nine tenths of the image and changes least.
RUN --mount=type=bind,source=wheelhouse,target=/wheelhouse \
    version=$(sed -n 's/^torch==//p' /src/constraints.txt) \
    && index=$TORCH_INDEX_URL \
    && if [ -z "$index" ] && [ "$TORCH" = cpu ] \
        && [ -z "$(find /wheelhouse -name "torch-$version[-+]*.whl")" ] \
        && ! /opt/venv/bin/pip config list | grep -Eq "(index-url|find-links|no-index)='[^']"; then \
        index=https://download.pytorch.org/whl/cpu; \
    fi \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --find-links /wheelhouse \
        ${index:+--extra-index-url "$index"} -c /src/constraints.txt "torch==$version" \
    && found=$(/opt/venv/bin/python -c 'import torch; print("cuda" if torch.version.cuda else "cpu")') \
    && if [ "$found" != "$TORCH" ]; then \
        echo "pip found a $found build of torch $version, but TORCH=$TORCH was asked for: give TORCH_INDEX_URL (the address of PyTorch's index of $TORCH builds), put that wheel into wheelhouse/, or build with TORCH=$found" >&2; \
        exit 2; \
    fi
COPY pyproject.toml README.md LICENSE /src/
COPY native /src/native
COPY shardline /src/shardline
COPY services /src/services
COPY worker /src/worker
COPY chief /src/chief
COPY evaluator /src/evaluator
COPY pipeline /src/pipeline
COPY lab /src/lab
COPY examples /src/examples
COPY launchers /src/launchers
RUN --mount=type=bind,source=wheelhouse,target=/wheelhouse \
    /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --find-links /wheelhouse \
        -c /src/constraints.txt "/src${EXTRAS:+[$EXTRAS]}" \
    && /opt/venv/bin/pip check

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Shardline" \
    org.opencontainers.image.licenses="Apache-2.0"
# A fixed number, so that volumes and mounted files can be given to it.
ARG UID=10001
RUN groupadd --gid "$UID" shardline \
    && useradd --uid "$UID" --gid "$UID" --no-create-home --home-dir /tmp --shell /usr/sbin/nologin shardline \
    && install -d -o shardline -g shardline /out /out/checkpoints /out/logs /run/shardline
COPY --from=build /opt/venv /opt/venv
# MALLOC_*: blocks of some megabytes are kept when they are freed, as the launcher has it for the tasks it starts.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MALLOC_MMAP_THRESHOLD_=1073741824 \
    MALLOC_TRIM_THRESHOLD_=1073741824 \
    MALLOC_ARENA_MAX=1
USER shardline
WORKDIR /tmp
# Services, metrics.
EXPOSE 2222 9464
# The standard gRPC health service of the task; SHARDLINE_HEALTH_ADDRESS where it does not listen on port 2222.
HEALTHCHECK --interval=5s --timeout=10s --start-period=600s --retries=3 CMD ["shardline", "health"]
ENTRYPOINT ["shardline"]
CMD ["--help"]

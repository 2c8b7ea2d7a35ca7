# The command `zerotrain` in an image; docs/guides/container.md says how it is built and run.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY conf conf
COPY zerotrain zerotrain
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# An index of pip with PyTorch's builds for CPUs, or for a release of CUDA; empty: what pip's own index has.
ARG TORCH_INDEX=""
ARG EXTRAS="hf,metrics,parquet,tensorboard,zstd"
COPY constraints.txt /opt/zerotrain/
# torch alone, before the rest: a change of zerotrain leaves the largest layer as it is.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /opt/zerotrain/constraints.txt torch
COPY --from=wheel /wheels /opt/zerotrain/wheels
RUN pip install --no-cache-dir -c /opt/zerotrain/constraints.txt \
        "$(echo /opt/zerotrain/wheels/zerotrain-*.whl)[$EXTRAS]" \
    && useradd --create-home --uid 1000 zerotrain \
    && install --directory --owner zerotrain /runs
USER 1000
WORKDIR /runs
CMD ["zerotrain", "--help"]

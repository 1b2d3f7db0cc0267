# docker build -t query-mutator . && docker run --rm -v "$PWD:/work" query-mutator train --backend recorded
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml MANIFEST.in README.md LICENSE train_query_mutator.py rl_query_mutator_env.py ollama_utils.py \
     benchmark_batching.py ./
COPY ppo ppo
COPY query_mutator query_mutator
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
# The CPU build of torch saves several GB; the models run in another container.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0
COPY requirements.txt /dist/
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --constraint /dist/requirements.txt "$(ls /dist/*.whl)[train]"
RUN useradd --create-home --uid 1000 qm && install --directory --owner qm --group qm /work
USER qm
WORKDIR /work
ENTRYPOINT ["qm"]
CMD ["--help"]

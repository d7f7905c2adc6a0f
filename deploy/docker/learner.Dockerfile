# The learner on NVIDIA GPUs: DeepSpeed and torch's CUDA build. Parsed by tests, not run.
FROM python:3.11-slim-bookworm

# DeepSpeed compiles its optimizers at the first start.
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY deploy deploy
RUN pip install -q -c deploy/constraints/gpu.txt -e ".[learner]" \
    && useradd --uid 1000 --create-home agent \
    && mkdir /runs && chown agent /runs
COPY examples examples

USER agent
VOLUME /runs
ENTRYPOINT ["agent-r1"]
CMD ["serve", "learner", "examples/multihop_qa/configs/grpo_1.5b_1gpu_80gb.toml"]

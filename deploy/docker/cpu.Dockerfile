# Rollout or learner on a CPU: vLLM's CPU build, DeepSpeed, and torch without CUDA.
FROM python:3.11-slim-bookworm

# vLLM's CPU build links to libnuma.
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

# The packages first: this layer changes only with the lock. The index of PyTorch is asked only when
# the configured ones have no CPU build of torch.
COPY deploy/constraints/cpu.txt deploy/constraints/cpu.txt
RUN pip install -q --no-deps $(grep -E '^setuptools==' deploy/constraints/cpu.txt) \
    && torch=$(grep -E '^torch==' deploy/constraints/cpu.txt) \
    && { pip install -q --no-deps "$torch" \
        || pip install -q --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$torch"; } \
    && pip install -q --no-deps --no-build-isolation -r deploy/constraints/cpu.txt

COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY deploy deploy
COPY examples examples
COPY scripts scripts
RUN pip install -q --no-deps --no-build-isolation -e . \
    && python scripts/demo --world-only \
    && useradd --uid 1000 --create-home agent \
    && mkdir /runs && chown agent /runs && chown -R agent examples

USER agent
VOLUME /runs
ENTRYPOINT ["agent-r1"]
CMD ["--help"]

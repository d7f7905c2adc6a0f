# A rollout server on NVIDIA GPUs: vLLM's official image and this project. Parsed by tests, not run.
FROM vllm/vllm-openai:v0.32.0

WORKDIR /app
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY deploy deploy
# The image has vLLM and torch; what else the service imports comes at the locked versions.
RUN pip install -q --break-system-packages -c deploy/constraints/gpu.txt -e . \
    && useradd --uid 1000 --non-unique --create-home agent \
    && mkdir /runs && chown agent /runs
COPY examples examples

USER agent
ENTRYPOINT ["agent-r1"]
CMD ["serve", "rollout", "examples/multihop_qa/configs/grpo_1.5b_1gpu_80gb.toml"]

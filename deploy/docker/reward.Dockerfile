# The reward service: scores trajectories. No torch.
FROM python:3.11-slim-bookworm

WORKDIR /app
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY deploy deploy
RUN pip install -q -c deploy/constraints/cpu.txt -e ".[reward]" \
    && useradd --uid 1000 --create-home agent \
    && mkdir /runs && chown agent /runs
COPY examples examples

USER agent
ENTRYPOINT ["agent-r1"]
CMD ["serve", "reward", "examples/tiny_world/run.toml"]
EXPOSE 8001

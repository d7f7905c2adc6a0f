# A tool service: search, python_exec or another. No torch. `agent-r1 serve tool ...` says which.
FROM python:3.11-slim-bookworm

# bubblewrap isolates the code that python_exec runs.
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY deploy deploy
RUN pip install -q -c deploy/constraints/cpu.txt -e ".[tools]"
# Changes the image without a change of code, to try a replacement.
ARG REBUILT=0
COPY scripts scripts
COPY examples examples
RUN python scripts/demo --world-only \
    && useradd --uid 1000 --create-home agent \
    && mkdir /runs && chown agent /runs && chown -R agent examples

USER agent
ENTRYPOINT ["agent-r1"]
CMD ["serve", "search", "examples/tiny_world/run.toml"]
EXPOSE 8001

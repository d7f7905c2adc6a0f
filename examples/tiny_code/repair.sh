#!/bin/sh
# Evaluate the base model and both trained agents by repair.toml, from the repository root. The runs
# of run.toml and silent.toml must have ended. Results are written to runs/tiny_code/repair.
set -eu
for agent in base tiny-code tiny-code-silent; do
    policy="runs/$agent"
    if [ "$agent" = base ]; then policy=examples/tiny_code/base; fi
    .venv/bin/agent-r1 evaluate examples/tiny_code/repair.toml --policy "$policy" \
        --out "runs/tiny_code/repair/$agent.jsonl"
done

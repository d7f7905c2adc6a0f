#!/bin/sh
# Train the supervised arm of table.toml, from the repository root: three runs of sft.toml.
set -eu
for seed in 0 1 2; do
    .venv/bin/agent-r1 sft examples/tiny_math/sft.toml --set run.seed="$seed" \
        --set sft.output="runs/tiny_math/sft_seed$seed"
done

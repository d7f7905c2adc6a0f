#!/bin/sh
# Train the agents and critics on which ways to decode are compared, from the repository root. What is
# finished is kept: start it again to continue. run.toml says why the agents learn slowly.
set -eu
example=examples/lookahead
runs=runs/lookahead/decoding
for seed in 0 1 2; do
    run="$runs/ppo_seed$seed"
    # --resume of a finished run ends at once. Status 3: it is finished, with losses that were named.
    if [ -f "$run/config.json" ]; then
        .venv/bin/agent-r1 train --resume "$run" || [ $? -eq 3 ]
    else
        .venv/bin/agent-r1 train "$example/run.toml" --run-dir "$run" --set run.seed="$seed" || [ $? -eq 3 ]
    fi
    if [ ! -d "$runs/critic_seed$seed" ]; then
        .venv/bin/agent-r1 export "$run" "$runs/critic_seed$seed" --critic
    fi
done

#!/bin/sh
# Let the base model and the agents of both tables repair the programs of repair.toml, and write first
# programs that they cannot repair. From the repository root, after table.toml and table_silent.toml.
# What has been answered is kept: start it again to continue.
set -eu
example=examples/tiny_code
answers=runs/tiny_code/repair

ask() { # ask NAME POLICY
    .venv/bin/agent-r1 evaluate "$example/repair.toml" --policy "$2" --out "$answers/$1.jsonl"
}

ask base "$example/base"
for seed in 0 1 2; do
    ask "grpo_seed$seed" "runs/table/error_text/runs/grpo_seed$seed"
    ask "grpo_silent_seed$seed" "runs/table/no_error_text/runs/grpo_silent_seed$seed"
done
exec .venv/bin/python "$example/repair.py" "$answers"

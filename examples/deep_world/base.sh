#!/bin/sh
# Make the base model again, from the repository root: world, initial weights, training. It writes
# runs/deep_world/base, which was copied unchanged to examples/deep_world/base, and compares the two.
set -eu
example=examples/deep_world
.venv/bin/python "$example/generate.py" --seed 0 --out "$example/data"
.venv/bin/python "$example/init_model.py" --seed 0 --out runs/deep_world/init
.venv/bin/agent-r1 sft "$example/base.toml"
(cd runs/deep_world && sha256sum --check "../../$example/base.sha256")

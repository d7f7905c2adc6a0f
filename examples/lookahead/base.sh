#!/bin/sh
# Make the base model again, from the repository root: world, initial weights, training. It writes
# runs/lookahead/base, which was copied unchanged to examples/lookahead/base, and compares the two.
set -eu
example=examples/lookahead
.venv/bin/python "$example/generate.py" --seed 0 --out "$example/data"
.venv/bin/python "$example/init_model.py" --seed 0 --out runs/lookahead/init
.venv/bin/agent-r1 sft "$example/base.toml"
(cd runs/lookahead && sha256sum --check "../../$example/base.sha256")

#!/bin/sh
# Make the base model again, from the repository root: exercises, initial weights, training. It writes
# runs/tiny_code/base, which was copied unchanged to examples/tiny_code/base, and compares the two.
set -eu
example=examples/tiny_code
.venv/bin/python "$example/generate.py" --seed 0 --out "$example/data"
.venv/bin/python "$example/init_model.py" --seed 0 --out runs/tiny_code/init
.venv/bin/agent-r1 sft "$example/base.toml"
(cd runs/tiny_code && sha256sum --check "../../$example/base.sha256")

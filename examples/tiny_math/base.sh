#!/bin/sh
# Make the base model again, from the repository root: problems, initial weights, training. It writes
# runs/tiny_math/base, which was copied unchanged to examples/tiny_math/base, and compares the two.
set -eu
example=examples/tiny_math
.venv/bin/python "$example/generate.py" --seed 0 --out "$example/data"
.venv/bin/python "$example/init_model.py" --seed 0 --out runs/tiny_math/init
.venv/bin/agent-r1 sft "$example/base.toml"
(cd runs/tiny_math && sha256sum --check "../../$example/base.sha256")

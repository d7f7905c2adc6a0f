#!/bin/sh
# Train pi on the exercises of tiny_code, with three seeds; from the repository root, after `make setup`. It wants
# npm, and takes about an hour and a half on two cores; started again, it goes on where it stopped.
set -eu
example=examples/tiny_code
npm install --ignore-scripts --no-audit --no-fund --silent --prefix build/npm @mariozechner/pi-coding-agent@0.73.1
export PATH="$PWD/build/npm/node_modules/.bin:$PATH"
if ! [ -d runs/tiny_code_pi/base ]; then
    .venv/bin/python "$example/generate.py" --seed 0 --out "$example/data"
    .venv/bin/python "$example/pi_base.py" --out runs/tiny_code_pi
    .venv/bin/agent-r1 sft "$example/pi/base.toml"
fi
exec .venv/bin/agent-r1 table "$example/pi/table.toml"

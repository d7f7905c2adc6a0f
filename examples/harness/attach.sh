#!/bin/sh
# One attempt for `agent-r1 agents attach`: which task it is, the harness as it is, and its reward.
set -e
here=$(dirname "$(realpath "$0")")
python=${PYTHON:-python3}   # with httpx, which the harness needs
task=$("$python" -c 'import json, os; print(json.load(open(os.environ["AGENT_R1_TASK"]))["metadata"]["folder"])')
"$python" "$here/harness.py" "$here/$task" .
echo "{\"reward\": $(cat reward.txt)}" > "$AGENT_R1_REPORT"

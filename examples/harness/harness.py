"""An evaluation harness as they exist: it knows task folders and OpenAI's API, and nothing of us.

    python harness.py TASK_FOLDER LOGS_FOLDER

A task folder has `instruction.md`, `environment/` (the files that the agent works on) and
`tests/test.sh`, which writes a number to `reward.txt` in the folder that VERIFIER_LOGS names. The
agent has one tool, a shell in a copy of the environment.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

TURNS = 8
SHELL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the task's folder and read what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def run(command, folder, **environment):
    """Return what a command prints."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.stdout[-4000:]


def solve(instruction, folder):
    """Let the model work with the shell until it calls it no more."""
    messages = [{"role": "user", "content": instruction}]
    client = httpx.Client(
        base_url=os.environ["OPENAI_BASE_URL"],
        headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        timeout=300,
    )
    for _ in range(TURNS):
        body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [SHELL]}
        answer = client.post("/chat/completions", json=body)
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or []:
            command = json.loads(call["function"]["arguments"]).get("command", "")
            printed = run(str(command), folder)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": printed})
        if not message.get("tool_calls"):
            return


def main():
    """Work on one task, and test what came of it."""
    task, logs = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "app"
        shutil.copytree(task / "environment", folder)
        solve((task / "instruction.md").read_text(), folder)
        print(run(f"bash {task}/tests/test.sh", folder, VERIFIER_LOGS=str(logs)))


main()

"""An agent that asks for a few turns over a stream, asks again where one breaks off, and writes
down what it heard to the end. A program for `agent.command`; it imports nothing of ours.
"""

import json
import os
import sys
import time

import httpx

TURNS = 4
PATIENCE_S = 120.0


def heard(client: httpx.Client, messages: list[dict[str, str]]) -> str:
    """Return the next turn, however often the connection breaks."""
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "stream": True}
    deadline, tries = time.monotonic() + PATIENCE_S, 0
    while time.monotonic() < deadline:
        text, done = "", False
        try:
            headers = {"x-stainless-retry-count": str(tries)}
            with client.stream("POST", url, json=body, headers=headers) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        for choice in json.loads(line[6:]).get("choices", ()):
                            text += choice["delta"].get("content") or ""
        except httpx.HTTPError as exc:
            sys.stderr.write(f"try {tries}: {exc!r}\n")
        if done:
            return text
        tries += 1
        time.sleep(0.3)
    raise SystemExit("no turn came to its end")


def main() -> None:
    """Have a dialogue."""
    messages = [{"role": "user", "content": sys.stdin.read()}]
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    told: list[str] = []
    with httpx.Client(headers=headers, timeout=30.0, trust_env=False) as client:
        for _ in range(TURNS):
            told.append(heard(client, messages))
            with open("heard.json", "w", encoding="utf-8") as file:
                json.dump(told, file)
            messages += [
                {"role": "assistant", "content": told[-1]},
                {"role": "user", "content": "go on"},
            ]


main()

"""An agent without any SDK: a program that reads a question and prints an answer.

`agent.command = ["python", "raw_client.py"]` trains it. It keeps its own history, and asks for the
next turn until one has no call.
"""

from __future__ import annotations

import json
import os
import sys

import httpx

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


def main() -> None:
    """Answer the question on standard input."""
    url = os.environ["OPENAI_BASE_URL"]
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    messages = [{"role": "user", "content": sys.stdin.read()}]
    with httpx.Client(headers=headers, timeout=120, trust_env=False) as client:
        for _ in range(5):
            body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [TOOL]}
            answer = client.post(f"{url}/chat/completions", json=body).raise_for_status()
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                print(message["content"])
                return
            for call in message["tool_calls"]:
                name, arguments = (
                    call["function"]["name"],
                    json.loads(call["function"]["arguments"]),
                )
                found = client.post(f"{url.removesuffix('/v1')}/tools/{name}", json=arguments)
                text = found.json().get("text") or found.json()["error"]["message"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    raise SystemExit("no answer within five turns")


if __name__ == "__main__":
    main()

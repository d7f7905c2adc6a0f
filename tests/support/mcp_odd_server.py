"""An MCP server over stdio without the SDK, whose tools have schemas that the SDK would refuse."""

from __future__ import annotations

import json
import sys
from typing import Any

BROKEN = {"type": "object", "properties": {"q": {"$ref": "#/$defs/Gone"}}}
TOOLS = [
    {"name": "no_schema", "inputSchema": {}},
    {"name": "dangling", "inputSchema": BROKEN},
    {"name": "answers", "inputSchema": {"type": "object"}, "outputSchema": BROKEN},
]


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; None where the server does not know the method."""
    match message["method"]:
        case "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "odd", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            text = json.dumps(message["params"]["arguments"])
            return {"content": [{"type": "text", "text": text}], "structuredContent": {"q": 1}}
    return None


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked)
        said = {"error": {"code": -32601, "message": "unknown"}} if result is None else {}
        reply = {"jsonrpc": "2.0", "id": asked["id"]} | (said or {"result": result})
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()

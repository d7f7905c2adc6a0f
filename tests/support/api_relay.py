"""Gives pods the API server of a local cluster that serves it on the loopback interface only.

    python -m tests.support.api_relay

Does nothing where the Service `kubernetes` has an endpoint, as in every ordinary cluster. Else it
listens at the node's address, makes that the endpoint, and passes connections on until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

PIECE = 64 * 1024
NAME = "agent-r1-api-relay"
LABELS = {"kubernetes.io/service-name": "kubernetes"}


def kubectl(*arguments: str, given: object = None) -> Any:
    """Run one kubectl command on the default namespace; return its answer."""
    command = ["kubectl", "--namespace", "default", *arguments, "--output", "json"]
    text = None if given is None else json.dumps(given)
    done = subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def endpoint(address: str, port: int) -> dict[str, Any]:
    """Return the EndpointSlice that leads to an address."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": NAME, "labels": LABELS},
        "addressType": "IPv4",
        "ports": [{"name": "https", "protocol": "TCP", "port": port}],
        "endpoints": [{"addresses": [address]}],
    }


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what comes in, until it ends."""
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def main() -> None:
    """Relay, where it is needed."""
    selector = ",".join(f"{name}={value}" for name, value in LABELS.items())
    found = kubectl("get", "endpointslices", "--selector", selector)["items"]
    if any(one["metadata"]["name"] != NAME for one in found):  # ours is of an earlier relay
        return
    api = urlsplit(kubectl("config", "view", "--minify")["clusters"][0]["cluster"]["server"])
    addresses = kubectl("get", "nodes")["items"][0]["status"]["addresses"]
    address = next(one["address"] for one in addresses if one["type"] == "InternalIP")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(api.hostname, api.port)
        await asyncio.gather(pass_on(reader, there_writer), pass_on(there_reader, writer))

    async with await asyncio.start_server(relay, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        kubectl("apply", "--filename", "-", given=endpoint(address, port))
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

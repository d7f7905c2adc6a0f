"""A rollout server's end of a collective transfer, in a process of its own, which can be killed.

    python -m tests.support.collective_member INVITATION VERSION LOCATION SERVER_ID FOLDER [STOP_AT]

Prints "stopped" and waits for ever before the broadcast that STOP_AT counts from 0; without it,
prints the path of what it received.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

from agent_r1.weights import collective
from agent_r1.weights.collective import CollectiveFetcher
from agent_r1_proto.weights import Invitation, NewestVersion


async def receive(arguments: list[str]) -> str:
    """Come to the learner that invites, and return the path of what it has sent."""
    invitation, version, location, server_id, folder = arguments[:5]
    async with CollectiveFetcher("test", server_id, Path(folder), 60.0) as fetcher:
        fetcher.accept(Invitation.model_validate_json(invitation))
        newest = NewestVersion(policy_version=int(version), manifest_location=location)
        return (await fetcher.fetch(newest)).location


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Receive one version."""
    stop_at = int(sys.argv[6]) if len(sys.argv) > 6 else -1
    broadcast, done = collective._Group.broadcast, 0

    def told(self: collective._Group, data: Any) -> None:
        nonlocal done
        if done == stop_at:
            say("stopped")
            threading.Event().wait()
        broadcast(self, data)
        done += 1

    collective._Group.broadcast = told
    say(asyncio.run(receive(sys.argv[1:])))


if __name__ == "__main__":
    main()

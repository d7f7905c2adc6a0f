"""A consumer in a process of its own, for tests that kill one: takes tasks and reports each.

Run as `python stream_worker.py URL RUN_ID CONSUMER MODE`; MODE `hold` takes an entry, prints it and
never finishes it; `echo` finishes every entry, publishing a trajectory for it; `crash` ends the
process at an entry of group 0, and finishes every other.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agent_r1_proto.component_notes import begin_component
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from tests.support.builders import trajectory


async def main(url: str, run_id: str, consumer_name: str, mode: str) -> None:
    """Consume until killed."""
    broker = await Broker.connect(url, run_id, lease_s=0.6)
    consumer = broker.consumer(
        broker.keys.tasks, RolloutTask, group="rollout", consumer=consumer_name
    )
    async with consumer:
        while True:
            for entry in await consumer.read(8, 1.0):
                print(entry.message.stream_key(), flush=True)  # noqa: T201
                consumer.note_components(entry)
                await begin_component("component 'x'")
                if mode == "crash" and entry.message.key.group_id == 0:
                    os._exit(7)
                if mode == "hold":
                    await asyncio.Event().wait()
                record = trajectory(entry.message)
                await consumer.finish(entry, [(broker.keys.trajectories, record)])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

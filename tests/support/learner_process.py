"""A learner in a process of its own, for tests that kill one.

Run as `python learner_process.py SETTINGS`, a JSON object of `training_spec`'s arguments, and
`kill_at`: the step in whose middle the process ends, as after kill -9.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agent_r1.learner.main import run_until_stopped
from tests.support.learner_fakes import FakeEngine, training_spec


def main(settings: dict[str, Any]) -> None:
    """Train until the end, a signal or the kill."""
    folder = Path(settings.pop("folder"))
    engine = FakeEngine(kill_at=settings.pop("kill_at", None), train_s=settings.pop("train_s", 0.0))
    spec = training_spec(folder, **settings)
    asyncio.run(run_until_stopped(spec, engine, folder))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

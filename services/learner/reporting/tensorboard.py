"""TensorBoard events: run_folder.py --numbers of a step--> `events.out.tfevents.*`.

Written with tensorboard's own message and record classes, one flushed record a step; TensorFlow is
never imported.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

# protobuf builds these classes at import time, where pyright cannot see them.
from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import RecordWriter

FILE_VERSION = "brain.Event:2"


class EventLog:
    """One event file; a resumed run starts another one beside it."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open a new event file.

        Args:
            directory: folder that TensorBoard is pointed at.
            first_step: readers forget what earlier files say of this step and later ones.
        """
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        stem = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / stem).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version=FILE_VERSION))
        if first_step > 0:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=now, step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the numbers of one step and flush."""
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

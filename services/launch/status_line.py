"""A line of the terminal that changes, below lines that stay: `agent-r1 evaluate`, `table`.

Where the output is not a terminal, `live` is False, and callers print lines that stay only. This is
not `rich.live`, which would hide the cursor and redirect standard output for one short line.
"""

from __future__ import annotations

import threading
from typing import TextIO


class StatusLine:
    """Writes to `output`; may be used from several threads."""

    def __init__(self, output: TextIO) -> None:
        self.live = output.isatty()
        self._output = output
        self._lock = threading.Lock()
        self._width = 0

    def show(self, text: str) -> None:
        """Put a text in the place of the one that is shown."""
        with self._lock:
            print(f"\r{text:<{self._width}}", end="", file=self._output, flush=True)
            self._width = len(text)

    def print(self, line: str) -> None:
        """Print a line that stays."""
        with self._lock:
            if self._width:
                print(f"\r{'':<{self._width}}\r", end="", file=self._output)
                self._width = 0
            print(line, file=self._output, flush=True)

    def close(self) -> None:
        """Leave the line."""
        if self._width:
            print(file=self._output)
            self._width = 0

"""Signals that end the diagnosis: at once while it is imported, in order while it runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def answer(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Let a handler answer the signals that end a program, unless they are ignored (nohup)."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def end_at_once(number: int, _: object) -> None:
    """End as the signal would have done; Ctrl-C needs no word."""
    if number != signal.SIGINT:
        sys.stderr.write(f"gpu_test: ended by {signal.Signals(number).name} before it began\n")
        sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def interrupt(number: int, _: object) -> None:
    """End in order, so that there is a report."""
    raise KeyboardInterrupt(signal.Signals(number).name)

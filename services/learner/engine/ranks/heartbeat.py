"""Signs of life and last words between ranks, so that the end of one is known on all at once.

group.py (rank 0) <--words, in a group of two--> worker.py

Rank 0 sends each other rank a word every `BEAT_S` and gets one back. An empty word is a sign of
life. A process that ends closes its connections, which breaks the exchange; a machine that is gone
or a process that is frozen is silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BEAT_S = 0.25
LOST_AFTER_S = 40.0
"""A rank that is silent for this long is lost."""
WORD_BYTES = 2048
STOP = "stop"
"""Word of another rank to rank 0: it was asked to stop, so all should. After END: they were."""
END = "end:"
"""Word of rank 0 to the others: the ranks end; then why, or "" when the work is done."""
LOST = "lost:"
"""Heard of a rank whose connection broke; then how."""


class Lifeline(threading.Thread):
    """Exchanges words with one rank until rank 0 says that the ranks end.

    Args:
        own_rank: this rank.
        peer: the other one; one of the two is rank 0.
        group: of the two.
        next_word: gives the next word: "", END, STOP or, of a rank other than 0, why it failed.
        on_word: called with the other's words but "", and with LOST when the connection breaks;
            must return at once.
    """

    def __init__(
        self,
        own_rank: int,
        peer: int,
        group: Any,
        next_word: Callable[[], str],
        on_word: Callable[[int, str], None],
    ) -> None:
        super().__init__(daemon=True, name=f"lifeline-{peer}")
        self._leads = own_rank == 0
        self._peer = peer
        self._group = group
        self._next_word = next_word
        self._on_word = on_word

    def run(self) -> None:
        """Exchange words."""
        last = time.monotonic()
        own = told = ""
        try:
            while not (own.startswith(END) or told.startswith(END)):
                if self._leads:
                    time.sleep(BEAT_S)
                    own = self._send()
                told = self._receive()
                if not self._leads:
                    own = self._send()
                last = time.monotonic()
                if told:
                    self._on_word(self._peer, told)
        except RuntimeError:  # torch's, of the connection
            silent = time.monotonic() - last >= LOST_AFTER_S
            how = f"gave no sign of life for {LOST_AFTER_S:g} s" if silent else "ended"
            self._on_word(self._peer, f"{LOST}rank {self._peer} {how}")

    def _send(self) -> str:
        word = self._next_word()
        data = word.encode()[:WORD_BYTES].ljust(WORD_BYTES, b"\0")
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.send(tensor, self._peer, group=self._group)
        return word

    def _receive(self) -> str:
        tensor = torch.zeros(WORD_BYTES, dtype=torch.uint8)
        dist.recv(tensor, self._peer, group=self._group)
        return tensor.numpy().tobytes().rstrip(b"\0").decode(errors="ignore")

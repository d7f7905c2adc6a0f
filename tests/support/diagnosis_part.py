"""A part of the diagnosis that notes one figure, and then dies or hangs, or truncates its file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from scripts.gpu_test.parts import FIGURES, Figures

folder, how = sys.argv[1:]
Figures(Path(folder)).note(start_s=1.0)
if how == "hangs":
    signal.pause()
if how == "truncates":
    (Path(folder) / FIGURES).write_text('{"start_s"')
sys.stdout.write("out of memory\n")
sys.stdout.flush()
os._exit(3)

"""A part of the diagnosis that notes one figure, and then dies or hangs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from scripts.gpu_test.parts import Figures

folder, how = sys.argv[1:]
Figures(Path(folder)).note(start_s=1.0)
if how == "hangs":
    signal.pause()
sys.stdout.write("out of memory\n")
sys.stdout.flush()
os._exit(3)

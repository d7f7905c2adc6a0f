"""What processes of a sandbox use, as the system tells of real ones."""

from __future__ import annotations

import subprocess
import sys

from agent_r1.sandbox.processes import measure_memory

HELD = 64 * 2**20
LEADERLESS = f"""
import ctypes, threading, time
held = bytearray(b"x") * {HELD}
def wait():
    time.sleep(0.1)  # the main thread ends meanwhile
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    print("alone", flush=True)
    time.sleep(60)
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone, on x86-64
"""


def test_memory_counts_whose_main_thread_has_ended():
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"alone\n"
            found = measure_memory([process.pid])
        finally:
            process.kill()
    assert HELD < found < HELD + 64 * 2**20


def test_a_process_that_is_gone_uses_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert measure_memory([process.pid]) == 0

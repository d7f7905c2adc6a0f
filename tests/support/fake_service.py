"""A service for launcher tests: announces itself, answers /healthz, has a child of its own.

    python fake_service.py NAME JOURNAL [--announce-dir D] [--die-after N] [--exit-code C] ...

Writes one line per event (`start NAME PID`, `child NAME PID`, `stop NAME`) to the journal file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers every GET with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--announce-dir", type=Path)
    parser.add_argument("--child", action="store_true", help="start a child that detaches itself")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--complaint", help="print this and exit with --exit-code at once")
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--exit-when", type=Path, help="exit once this file exists")
    parser.add_argument("--last-words", help="print this when --exit-when ends it")
    parser.add_argument("--summary", type=Path, help="write a finished run's summary here")
    parser.add_argument("--stop-s", type=float, default=0.0, help="time that stopping takes")
    parser.add_argument("--resume-if-begun", action="store_true", help="write it down")
    arguments = parser.parse_args()

    def note(line: str) -> None:
        with arguments.journal.open("a") as file:
            file.write(f"{line}\n")

    for variable, value in sorted(os.environ.items()):
        if variable.startswith(("AGENT_R1_", "TORCHINDUCTOR_CACHE")):
            note(f"env {arguments.name} {variable} {value}")
    if arguments.resume_if_begun:
        note(f"resume {arguments.name}")
    if arguments.complaint:
        note(f"start {arguments.name} {os.getpid()}")
        sys.stderr.write(f"{arguments.complaint}\n")
        sys.exit(arguments.exit_code)
    if arguments.child:
        # A session of its own and no link to this process: the hardest kind of orphan to find.
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            start_new_session=True,
            env={},
        )
        note(f"child {arguments.name} {child.pid}")
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("FAKE_PORT", "0"))), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stopping = threading.Event()

    def on_sigterm(number: int, frame: object) -> None:
        note(f"sigterm {arguments.name}")
        if not arguments.stubborn:
            stopping.set()

    signal.signal(signal.SIGTERM, on_sigterm)
    note(f"start {arguments.name} {os.getpid()}")
    if arguments.announce_dir is not None:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        arguments.announce_dir.mkdir(parents=True, exist_ok=True)
        temporary = arguments.announce_dir / f"{arguments.name}.tmp"
        temporary.write_text(json.dumps({"name": arguments.name, "url": url, "pid": os.getpid()}))
        temporary.replace(arguments.announce_dir / f"{arguments.name}.json")
    while not stopping.wait(0.02):
        if arguments.exit_when is not None and arguments.exit_when.exists():
            if arguments.summary is not None:
                arguments.summary.write_text(json.dumps({"status": "finished", "steps": 3}))
            if arguments.last_words:
                sys.stderr.write(f"{arguments.last_words}\n")
            sys.exit(arguments.exit_code)
    time.sleep(arguments.stop_s)
    note(f"stop {arguments.name}")


if __name__ == "__main__":
    main()

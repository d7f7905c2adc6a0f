"""`agent-r1 ui [RUNS]`: the console, in a browser.

Serves the pages of services/console over a folder of runs, or the runs of a learner's address,
until it is told to stop.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_r1.cli.declare import integer
from agent_r1.config.host_settings import own_settings
from agent_r1.config.sources import ConfigError
from agent_r1.runtime.config import OWN_ADDRESS, ListenConfig, RunConfig
from agent_r1.runtime.http.token import find_token

PORT = 8700
LAST_PORT = 65535
EVERYWHERE = ("0.0.0.0", "::")


def ui_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ui`."""
    parser.add_argument(
        "runs",
        nargs="?",
        default="runs",
        metavar="RUNS",
        help="folder of the runs, one run folder, or http://HOST:PORT of a learner (default: runs)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=integer(0, LAST_PORT),
        default=PORT,
        help=f"port; 0 takes a free one (default: {PORT})",
    )
    parser.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="further name under which browsers may call it; repeat it for more",
    )


def ui(arguments: argparse.Namespace) -> int:
    """Show runs, curves, services and evaluations in a browser.

    On this machine alone, nothing has to be sent. With AGENT_R1_TOKEN or
    AGENT_R1__RUN__TOKEN_FILE, which other addresses need, a browser sends the token once; a
    learner is asked with it.
    """
    runs: str = arguments.runs
    is_address = runs.startswith(("http://", "https://"))
    if not is_address and not Path(runs).is_dir():
        raise ConfigError(
            f"RUNS ({runs}) is no folder; name the one that holds the run folders, or the "
            "http://HOST:PORT of a learner"
        )
    from agent_r1.console.main import serve
    from agent_r1.runs.remote import Mirror

    everywhere = arguments.host in EVERYWHERE
    listen = ListenConfig(
        host=arguments.host,
        port=arguments.port,
        advertise_host=OWN_ADDRESS if everywhere else None,
        allowed_hosts=arguments.allowed_hosts,
    )
    token = find_token(RunConfig.model_validate(own_settings([]).get("run", {})))
    serve(
        Mirror(runs, token) if is_address else Path(runs),
        listen,
        token,
        on_up=lambda url: print(f"the console of {runs} is at {url}; Ctrl-C ends it", flush=True),
    )
    return 0

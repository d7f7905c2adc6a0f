"""The `agent-r1` command: hands over to the function of the command that was given.

A `ValueError` (a configuration, a file, a port, a run that stopped for a known reason) is printed
as one message with exit status 2. Anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from agent_r1.cli.parser import build_parser, new_name
from agent_r1.learner.checkpoints.object_store import StoreError
from agent_r1.runtime.exit_status import ERROR_PREFIX, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REASON
from agent_r1.runtime.files.writing import DiskFullError

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if (new := new_name(words)) is not None:
        print(f"{ERROR_PREFIX}this command is now `agent-r1 {new}`", file=sys.stderr)
        return EXIT_REASON
    arguments = None
    try:
        arguments = build_parser().parse_args(words)
        if arguments.run is None:  # no command, or one that has commands of its own
            arguments.parser.print_help()
            return EXIT_REASON
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`agent-r1 show RUN | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (ValueError, DiskFullError, StoreError) as exc:
        # The launcher keeps a log, where a trace helps; a person reads the message.
        logged = getattr(arguments, "announce_dir", None) is not None
        logger.log(logging.ERROR if logged else logging.DEBUG, "stopped", exc_info=True)
        print(f"{ERROR_PREFIX}{exc}", file=sys.stderr)
        return EXIT_REASON


if __name__ == "__main__":
    sys.exit(main())

"""Exit statuses of the `agent-r1` command, and the mark of what it says on the way out.

The launcher reads both of the services it starts; scripts read those of the command.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Tell a service to stop in order."""

EXIT_FAILED = 1
"""A run stopped for a reason that was printed; or a check, an attempt or a bound failed."""
EXIT_REASON = 2
"""Status where nothing was done, or a service stopped, for a reason that was printed: trying again
is no help before the user has changed something."""
EXIT_LOSSES = 3
"""Finished, but more samples or questions were lost than is allowed; what was lost was printed."""
EXIT_INTERRUPTED = 130
"""Stopped by the user, in order."""

ERROR_PREFIX = "agent-r1: error: "
"""Stands before a message that is the whole story; the launcher looks for it in logs."""
NOTICE_PREFIX = "agent-r1: notice: "
"""Prefix of what a service that goes on says to the terminal: the launcher shows such lines."""

"""What the files and folders of a run are called.

The learner and the launcher write them; the command line and the launcher's views read them.
"""

from __future__ import annotations

CONFIG_FILE = "config.json"
"""The whole configuration, without secrets; a resume reads it."""
BUNDLE_FILE = "bundle.json"
"""What services that join on other hosts are given; the learner writes it at each start."""
LEDGER_FILE = "ledger.json"
"""The learner writes it before anything else; without it there is nothing to resume."""
LOCK_FILE = "learner.lock"
"""Locked by the learner that writes there, with its process id and host."""
LAUNCHER_FILE = "launcher.json"
"""While a run runs: the launcher's process id and its private folder."""
CLIENTS_DIR = "clients"
"""While commands such as `evaluate` run services of their own: the folders of these."""
LIVE_DIR = "live"
"""While a run runs: its token, the way to its Redis, announcements, temporary files; for their
owner alone. What a launcher that was killed leaves here is removed by the next start."""

METRICS_FILE = "metrics.jsonl"
"""One line a step."""
EVALUATIONS_FILE = "evaluations.jsonl"
"""One line an evaluation."""
ANSWERS_FILE = "evaluation_after.jsonl"
"""One line a question of the last evaluation."""
FAILURES_FILE = "failures.jsonl"
"""The first failure of each kind."""
CONDITIONS_FILE = "conditions.jsonl"
"""What was wrong for a while: a line when it began, and one when it was over."""
DEAD_LETTERS_FILE = "dead_letters.jsonl"
"""Entries that no service could process, one line each, the newest 256; replaced as a whole."""
SUMMARY_FILE = "summary.json"
"""What the run came to, written at its end."""

LOGS_DIR = "logs"
TENSORBOARD_DIR = "tensorboard"
TRAJECTORIES_DIR = "trajectories"
CHECKPOINTS_DIR = "checkpoints"
STATE_FILE = "learner.json"
"""In the folder of a checkpoint: where the learner stood."""

"""`mlflow`: an MLflow server, or without `MLFLOW_TRACKING_URI` a database in the run folder."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.loggers.completions import COLUMNS, Completion
from agent_r1.runtime.imports import import_extra

EXPERIMENT = "agent-r1"
"""Experiment where MLFLOW_EXPERIMENT_NAME names no other."""
FILES_DIR = "mlflow_files"
"""Folder of MLflow's files in the run folder, where no server keeps them."""
RUN_TAG = "agent_r1.run"
TABLES_TAG = "mlflow.loggedArtifacts"
"""Tag of a run that says which of its files MLflow shows as tables."""
MAX_PARAMETER_CHARS = 500
_FORBIDDEN = re.compile(r"[^\w./ -]")
"""Characters that MLflow does not allow in the name of a metric or a parameter."""


class MlflowLogger:
    """One run of MLflow, which a resumed run continues."""

    def __init__(self, run: RunFacts) -> None:
        mlflow = import_extra("mlflow", "mlflow", 'learner.loggers ("mlflow")')
        self._entities = mlflow.entities
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        # Beside a database, MLflow would write files to the current folder.
        self._files = None if uri else str(run.folder / FILES_DIR)
        uri = uri or f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = self._find(run) or self._create(run)
        self._newest_step = self._find_newest_step()

    def _find(self, run: RunFacts) -> str | None:
        found = self._client.search_runs(
            [self._experiment()], filter_string=f"tags.`{RUN_TAG}` = '{run.unique_id}'"
        )
        return found[0].info.run_id if found else None

    def _find_newest_step(self) -> int:
        """Return the last step that MLflow has numbers of; 0 without any."""
        names = self._client.get_run(self._run_id).data.metrics
        histories = (self._client.get_metric_history(self._run_id, name) for name in names)
        return max((entry.step for history in histories for entry in history), default=0)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(name, artifact_location=self._files)

    def _create(self, run: RunFacts) -> str:
        made = self._client.create_run(
            self._experiment(), run_name=run.id, tags={RUN_TAG: run.unique_id}
        )
        for key, value in _flat(run.config):
            self._client.log_param(made.info.run_id, key, value)
        return made.info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers, but for a step that is made again after a resume: MLflow keeps both."""
        if step <= self._newest_step:
            return
        now_ms = round(1000 * time.time())
        metric = self._entities.Metric
        metrics = [
            metric(_FORBIDDEN.sub("_", name), value, now_ms, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Send a table as a file of its own, which MLflow shows; those before stay as files.

        MLflow's own `log_table` would fetch and send the whole table again at every step, or fill
        the tag that lists the tables.
        """
        if step <= self._newest_step:
            return
        file = f"completions/step_{step:06d}.json"
        table = {"columns": list(COLUMNS), "data": list(map(list, completions))}
        self._client.log_dict(self._run_id, table, file)
        listed = json.dumps([{"path": file, "type": "table"}])
        self._client.set_tag(self._run_id, TABLES_TAG, listed)

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._run_id)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        key = f"{prefix}{_FORBIDDEN.sub('_', str(name))}"
        if isinstance(value, Mapping):
            found += _flat(value, f"{key}.")
        else:
            found.append((key, str(value)[:MAX_PARAMETER_CHARS]))
    return found

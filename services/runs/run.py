"""A run folder, read: `agent_r1.load_run(path)` --> `Run`: configuration, numbers, trajectories.

Reads what learner and launcher write. Frames need pandas, and nothing else here does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1.runs.store import StoredFile, stored_files
from agent_r1.runtime.files.run_folder import (
    CHECKPOINTS_DIR,
    CONDITIONS_FILE,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    FAILURES_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
)
from agent_r1.runtime.files.state import parse_objects, read_object
from agent_r1.runtime.imports import import_extra

if TYPE_CHECKING:
    import pandas as pd

TOKENIZER_FILE = "tokenizer.json"


class Run:
    """A run folder, of a run that has ended or still goes on; nothing is written to it.

    Args:
        path: the run folder.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.config: dict[str, Any] = read_object(self.path / CONFIG_FILE)
            """Resolved configuration, without secrets."""
        except (OSError, ValueError) as exc:
            raise ValueError(
                f"{self.path} is no run folder: {CONFIG_FILE} cannot be read ({exc}); name one, "
                "such as runs/demo"
            ) from exc

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` says; empty while the run goes on."""
        try:
            return read_object(self.path / SUMMARY_FILE)
        except (OSError, ValueError):
            return {}

    @property
    def events(self) -> list[dict[str, Any]]:
        """Failures and conditions, each kind in its order; `event` says which one it is."""
        return [
            {"event": event, **line}
            for event, name in (("failure", FAILURES_FILE), ("condition", CONDITIONS_FILE))
            for line in self._lines(name)
        ]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Evaluations in their order: step, name, and the scores of each set."""
        return self._lines(EVALUATIONS_FILE)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Numbers of every step, as `metrics.jsonl` has them."""
        return self._lines(METRICS_FILE)

    @property
    def metrics(self) -> pd.DataFrame:
        """Numbers of every step, as a frame with the step as its index."""
        return self._frame(self.steps, ["step"]).set_index("step")

    @property
    def trajectories(self) -> pd.DataFrame:
        """Stored trajectories, a row each: the flat columns, and `reward/NAME` by component.

        `file` and `row` find the whole of one: `run.file(row.file).read(row.row)`.
        """
        return self._frame(list(self.rows()), ["file", "row"])

    def rows(self, first: int | None = None, last: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of the samples between two steps, both included; without them, all rows.

        Those of evaluations have `evaluation`, and come with all rows alone.
        """
        for file in self.files():
            wanted = file.step is not None and (first or 0) <= file.step <= (last or file.step)
            if wanted or (first is None and last is None):
                for number, row in enumerate(file.rows()):
                    measured = {f"reward/{n}": v for n, v in row.pop("components").items()}
                    yield {"file": file.path.name, "row": number, **row, **measured}

    def files(self) -> list[StoredFile]:
        """Return the files of stored trajectories: steps in their order, then evaluations."""
        return stored_files(self.path)

    def file(self, name: str) -> StoredFile:
        """Return the file of a row.

        Raises:
            ValueError: there is none of that name.
        """
        for file in self.files():
            if file.path.name == name:
                return file
        raise ValueError(f"{self.path} has no trajectories {name}; the run has removed them")

    def token_texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None where the model's tokenizer is not on this machine.

        A character of several tokens is a replacement character in each of them.
        """
        if self._tokenizer is None:
            return None
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]

    @cached_property
    def _tokenizer(self) -> Any:
        folders = [*(self.path / CHECKPOINTS_DIR).glob("step_*/model"), Path(self._model_path)]
        for file in (folder / TOKENIZER_FILE for folder in folders):
            if file.is_file():
                return import_extra("tokenizers", "learner", str(file)).Tokenizer.from_file(
                    str(file)
                )
        return None

    @property
    def _model_path(self) -> str:
        return str(self.config.get("model", {}).get("path", ""))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            return parse_objects((self.path / name).read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            return []

    def _frame(self, rows: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
        pandas = import_extra("pandas", "data", "a frame of a run")
        return pandas.DataFrame(rows) if rows else pandas.DataFrame(columns=columns)


def load_run(path: str | Path) -> Run:
    """Read a run folder: of this version or an older one, also while the run goes on.

    Args:
        path: the run folder.

    Raises:
        ValueError: it is none.
    """
    return Run(path)

"""`agent-r1 export RUN OUT --trajectories FORMAT`: stored trajectories for other programs.

Reads a run folder; writes a folder with an ATIF document for each trajectory, or one Parquet file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic_core import to_json

from agent_r1.config.packages import installed_version
from agent_r1.config.sources import ConfigError
from agent_r1.runs.atif import atif_document
from agent_r1.runs.run import load_run
from agent_r1.runs.store import StoredFile, StoredTrajectory, write_parquet
from agent_r1.runtime.files.writing import replace_directory, report_full_disk

FORMATS = ("atif", "parquet")
PARQUET_FILE = "trajectories.parquet"


def export_trajectories(run_folder: Path, out: Path, form: str, step: int | None) -> str:
    """Write the stored trajectories of a run; return what was written, for the user.

    Args:
        run_folder: of the run.
        out: folder; must not exist, or be empty.
        form: `atif` or `parquet`.
        step: the only step that is written; None: all steps and evaluations.

    Raises:
        ConfigError: there are none.
        ValueError: it is no run folder, or a file is damaged.
        DiskFullError: there is no room; nothing is left behind.
    """
    run = load_run(run_folder)
    files = [file for file in run.files() if step is None or file.step == step]
    if not files:
        which = "trajectory" if step is None else f"trajectory of step {step}"
        raise ConfigError(
            f"{run_folder} has no stored {which}; learner.trajectories_per_step says how many of "
            "each batch are stored"
        )
    with report_full_disk("the export", out), replace_directory(out) as staging:
        if form == "parquet":
            with (staging / PARQUET_FILE).open("wb") as output:
                write_parquet(output, _all(files))
            return f"{out / PARQUET_FILE}: the trajectories of {len(files)} files"
        model = run.config.get("model", {}).get("path")
        version, count = installed_version("agent-r1"), 0
        for file in files:
            folder = staging / file.path.stem
            folder.mkdir()
            for number, stored in enumerate(file.trajectories()):
                document = atif_document(stored, version=version, model=model)
                # Older files may hold NaN, which is no JSON.
                text = to_json(document, inf_nan_mode="null")
                (folder / f"{number:05d}.json").write_bytes(text)
                count += 1
    return f"{out}: {count} trajectories, a file each, in a folder for each step and evaluation"


def _all(files: Sequence[StoredFile]) -> Iterator[tuple[StoredTrajectory, str | None]]:
    for file in files:
        for stored in file.trajectories():
            yield stored, file.evaluation

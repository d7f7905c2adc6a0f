"""Models of the Hugging Face hub, by name: found in the hub's cache on this machine, or fetched.

`model.path` --name, revision--> here --folder--> learner and rollout. The hub's own client does the
work: it resumes what was interrupted, and reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from agent_r1.runtime.files.disk_space import readable_size, require_room

MODEL_FILES: list[str] = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
SMALL_FILES: list[str] = ["*.json", "*.txt", "*.jinja"]
"""Files that say what a model is, without its weights."""
OTHER_FILES: list[str] = ["*/*", "consolidated*"]
"""Folders hold the weights in formats of other programs; so do these files."""
PROGRESS_S = 5.0


class HubError(ValueError):
    """The hub does not provide a model; the text says why, and what to do."""


def model_folder(
    path: str,
    revision: str | None = None,
    *,
    key: str = "model.path",
    small: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the folder of a model, which is fetched where it is a name and not in the cache.

    Args:
        path: a folder, or a name on the hub (`owner/name`).
        revision: branch, tag or commit on the hub; None is its main branch.
        key: what messages call the path.
        small: the weights are not needed.
        report: is told how far a download is, every few seconds.

    Raises:
        HubError: the hub does not provide it, or the disk is too small for it.
    """
    if Path(path).is_dir():
        return Path(path).absolute()
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise HubError(
            f"{key} ({path}) is not a directory; give an existing Hugging Face model directory"
        )
    try:
        return _fetch(path, revision, SMALL_FILES if small else MODEL_FILES, report)
    except HubError:
        raise
    except Exception as exc:
        # The client raises errors of several libraries.
        reason = next(iter(str(exc).strip().splitlines()), "")
        where = path if revision is None else f"{path}, revision {revision}"
        raise HubError(
            f"{key} ({where}) is neither a directory nor a model that the hub delivers "
            f"({type(exc).__name__}: {reason}); correct the name or the revision, name a Hugging "
            "Face model directory, or set HF_HUB_OFFLINE=1 to use a copy in the hub's cache"
        ) from exc


def _fetch(
    name: str, revision: str | None, files: list[str], report: Callable[[str], None]
) -> Path:
    from huggingface_hub import (
        constants,
        snapshot_download,  # pyright: ignore[reportUnknownVariableType] - a type of tqdm
    )
    from tqdm import tqdm

    bar: Any = tqdm

    class NoBar(bar):
        """Draws nothing: what is reported stands for the client's bars."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # pyright: ignore

    fetch: Callable[..., Any] = functools.partial(
        snapshot_download,
        name,
        allow_patterns=files,
        ignore_patterns=OTHER_FILES,
        tqdm_class=NoBar,
    )
    if constants.HF_HUB_OFFLINE:
        return Path(fetch(revision=revision, local_files_only=True))
    plan = fetch(revision=revision, dry_run=True)
    if not plan:
        raise HubError(f"{name} has none of the files {', '.join(files)} on the hub")
    missing = [file for file in plan if file.will_download]
    cache = Path(constants.HF_HUB_CACHE)
    size = sum(file.file_size or 0 for file in missing)
    if missing:
        try:
            remedy = "set HF_HOME to a folder on a larger disk"
            require_room(f"the files of {name}", cache, size, remedy)
        except ValueError as exc:
            raise HubError(str(exc)) from exc
    blobs = cache / f"models--{name.replace('/', '--')}" / "blobs"
    with _reported(name, blobs, size, report):
        # The commit that was planned, though the branch may move meanwhile.
        return Path(fetch(revision=plan[0].commit_hash))


@contextlib.contextmanager
def _reported(name: str, blobs: Path, size: int, report: Callable[[str], None]) -> Generator[None]:
    """Report how much of a download has arrived while the block lasts."""
    if not size:
        yield
        return
    before, over = _bytes_in(blobs), threading.Event()

    def tell() -> None:
        while not over.wait(PROGRESS_S):
            arrived = readable_size(_bytes_in(blobs) - before)
            report(f"downloading {name}: {arrived} of {readable_size(size)}")

    report(f"downloading {name}: {readable_size(size)} into {blobs.parent}")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # a part that is complete gets another name
            total += path.stat().st_size
    return total

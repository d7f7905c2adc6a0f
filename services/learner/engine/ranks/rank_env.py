"""Rank of one learner process, read from the variables of every launcher.

torchrun, Ray, an indexed Job, or rank 0 for its own machine --environment--> `read_place`
--RankPlace--> group.py (rank 0), worker.py (the others)

Imports no torch, so that a wrong environment is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankPlace:
    """One rank, and where rank 0's store is."""

    rank: int = 0
    size: int = 1
    """Ranks in all."""
    local_rank: int = 0
    """Number among the ranks of this machine: which GPU it takes."""
    address: str = LOOPBACK
    """Host of the store."""
    port: int = 0
    """Port of the store; 0: rank 0 chooses one, and starts the other ranks on its own machine."""
    attempt: str | None = None
    """Number of restarts of the ranks by torchrun, where it holds the store."""

    def environment(self) -> dict[str, str]:
        """Return the variables that `read_place` reads."""
        values = (self.rank, self.size, self.local_rank, self.address, self.port)
        return {name: str(value) for name, value in zip(VARIABLES, values, strict=True)}


def read_place(environ: Mapping[str, str], ranks: int, table_name: str) -> RankPlace:
    """Return this process's place; that of a leader of its own machine where none is given.

    Args:
        environ: environment variables.
        ranks: the configured number of ranks.
        table_name: of the engine's table, for messages.

    Raises:
        ValueError: variables are missing, malformed, or contradict the configuration.
    """
    if "WORLD_SIZE" not in environ:
        return RankPlace(size=ranks)
    if missing := [name for name in VARIABLES if name not in environ]:
        raise ValueError(
            f"WORLD_SIZE ({environ['WORLD_SIZE']}) is set and {', '.join(missing)} is not; a rank "
            f"needs {', '.join(VARIABLES)}: set them all, as torchrun does, or none of them"
        )
    try:
        rank, size, local_rank, port = (
            int(environ[name]) for name in VARIABLES if name != "MASTER_ADDR"
        )
    except ValueError as exc:
        raise ValueError(f"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT: {exc}") from exc
    if size != ranks or not 0 <= rank < size:
        raise ValueError(
            f"{table_name}.ranks ({ranks}) must equal WORLD_SIZE ({size}), and RANK ({rank}) must "
            f"be below it; set {table_name}.ranks, in the configuration that every rank reads"
        )
    held_by_torchrun = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if held_by_torchrun else None
    return RankPlace(rank, size, local_rank, environ["MASTER_ADDR"], port, attempt)

"""Sources of tasks: `data.train` and `evaluation.sets` --> `DataSource` --> tasks.py.

A source is a file or a data set on the Hugging Face hub, and says which of its columns mean what.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from agent_r1.runtime.config import StrictConfig

HUB_PREFIX = "hf:"
PARQUET_SUFFIX = ".parquet"
_HUB_NAME = re.compile(
    r"^hf:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<subset>[^/:]+))?:(?P<split>[A-Za-z].*)$"
)
_TARGET = re.compile(r"^(id|prompt|answers|tools|tool_context|(payload|metadata)(\.\w+)?)$")


class DataSource(StrictConfig):
    """One file or data set of tasks. A text alone is its `source`."""

    SHORT_FORM: ClassVar[str] = "source"

    source: Path
    """JSON-lines file (plain or .gz), Parquet file, folder that `datasets.save_to_disk` wrote, or
    `hf:owner/name:split` on the Hugging Face hub (`hf:owner/name/subset:split`). All but the first
    need `pip install 'agent-r1[data]'`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Number of times that an epoch of training goes through the source: 2.0 is twice, 0.5 is
    through half of it, and through the other half in the next epoch."""
    columns: dict[str, str] = {}
    """Column of each part of a task: `id`, `prompt` (text or messages), `answers` (the accepted
    ones), `tools`, `tool_context`, `payload.NAME`, `metadata.NAME`. `a.b` is the field b of the
    column a. Empty: the columns are a task's own fields, or those of verl's Parquet files."""
    max_items: Annotated[int, Field(ge=1)] | None = None
    """Most tasks taken, from the beginning; None takes all."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, value: Any) -> Any:
        return {cls.SHORT_FORM: value} if isinstance(value, str | Path) else value

    @model_serializer(mode="wrap")
    def _write_a_name(self, dump: SerializerFunctionWrapHandler) -> Any:
        values = dump(self)
        plain = DataSource(source=self.source) == self
        return values["source"] if plain else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_hub and not _HUB_NAME.match(str(self.source)):
            raise ValueError(
                f"source ({self.source}) is not a data set of the hub; write hf:owner/name:split, "
                "or hf:owner/name/subset:split"
            )
        for target in self.columns:
            if not _TARGET.match(target):
                raise ValueError(
                    f"columns has {target!r}, which is no part of a task; use id, prompt, answers, "
                    "tools, tool_context, payload.NAME or metadata.NAME"
                )
        if self.columns and "prompt" not in self.columns:
            raise ValueError(
                f"columns ({', '.join(self.columns)}) does not say which column is the prompt; add "
                'prompt = "COLUMN"'
            )
        return self

    @property
    def is_hub(self) -> bool:
        """Return whether this is a data set on the hub."""
        return str(self.source).startswith(HUB_PREFIX)

    @property
    def is_parquet(self) -> bool:
        """Return whether this is a Parquet file, by its name."""
        return not self.is_hub and self.source.suffix == PARQUET_SUFFIX

    @property
    def is_table(self) -> bool:
        """Return whether it has rows of typed columns: all but JSON lines."""
        return self.is_hub or self.is_parquet or self.source.is_dir()

    def __str__(self) -> str:
        """Return the file, or the name on the hub."""
        return str(self.source)

    def hub_parts(self) -> tuple[str, str | None, str]:
        """Return repository, subset and split of a data set on the hub."""
        found = _HUB_NAME.match(str(self.source))
        assert found is not None  # checked when it was read
        return found["name"], found["subset"], found["split"]

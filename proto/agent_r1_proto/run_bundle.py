"""Run bundle: all that a service needs to join a run on a host that shares nothing with it.

The learner describes it in a `RunBundle`, serves that and its files over HTTP under their SHA-256,
and says in Redis where (`JoinOffer`). `agent-r1 serve SERVICE --join RUN_ID` reads them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1_proto.messages import Message, StrictMessage
from agent_r1_proto.weights import FileChunks

FILE_PATH = "/run/files/{sha256}"
"""Path at which the learner serves a file, and the bundle itself."""
TOOL_FILES = ("corpus", "ca_certs")
"""Keys of a tool's table that name a file."""
SHA256_PATTERN = r"^[0-9a-f]{64}$"


def model_part() -> str:
    """Name the files of version 0: weights, tokenizer, chat template."""
    return "model"


def adapter_part() -> str:
    """Name the files of the adapter that version 0 has (`model.lora.path`)."""
    return "adapter"


def plugin_part(index: int) -> str:
    """Name the files of the folder that is `run.plugins[index]`."""
    return f"plugins/{index}"


def tool_part(tool: str, key: str) -> str:
    """Name the file that a key of a tool's table names."""
    return f"tools/{tool}/{key}"


class BundleFile(StrictMessage):
    """One file of a part of the bundle."""

    part: str
    """`model`, `adapter`, `plugins/0`, `tools/search/corpus`."""
    path: str
    """Within the part, with `/` between folders."""
    sha256: Annotated[str, Field(pattern=SHA256_PATTERN)]
    size_bytes: Annotated[int, Field(ge=0)]
    chunks: FileChunks


class RunBundle(StrictMessage):
    """The configuration of a run and the files that it names."""

    schema_version: Literal["1.0"] = "1.0"
    run_id: str
    config: dict[str, Any]
    """Configuration, as in the run's `config.json`, without secrets."""
    packages: dict[str, str]
    """SHA-256 of every installed package that `run.plugins` names, by that entry."""
    files: list[BundleFile]
    missing: dict[str, str]
    """Parts that the learner's host cannot give, with the reason."""


class JoinOffer(Message):
    """Address at which the learner serves the bundle, kept in Redis under `join_offer`."""

    software: str
    """Version of agent_r1 that the learner runs; a service of another one cannot join."""
    url: str | None = None
    """Base URL of the learner's server; None where `refusal` says why there is none."""
    bundle_sha256: Annotated[str, Field(pattern=SHA256_PATTERN)] | None = None
    refusal: str | None = None

"""Weight versions: how the learner's weights reach the rollout servers.

learner writes a snapshot and its manifest, sets the newest version in Redis, and POSTs
`LoadRequest` to `/weights/load` of every announced rollout server; servers pull. After a push
`CanaryRequest` to `/weights/canary` compares log-probabilities.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.policies import DEFAULT_POLICY, PolicyName

SNAPSHOT_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
DELTA_FILE = "delta.zst"
TransportName = Literal["file", "http"]
"""How the bytes of a version travel: through a folder that all see, or over HTTP."""


class TensorEntry(StrictMessage):
    """One tensor of a snapshot."""

    name: str
    """Hugging Face parameter name; of an adapter, the name that PEFT gives it in a file."""
    shape: list[int]
    dtype: Literal["float32", "bfloat16", "float16"]
    sha256: str
    """Of the tensor's raw little-endian bytes."""
    alias_of: str | None = None
    """This name shares the tensor of another (tied embeddings); it has no bytes of its own."""


class FileChunks(StrictMessage):
    """The chunks of a file: each can be fetched from another source, and verified alone."""

    size_bytes: Annotated[int, Field(gt=0)]
    """Of every chunk but the last, which has the rest."""
    sha256: list[str]
    """Of the chunks, in order."""


class WeightDelta(StrictMessage):
    """A file from which a server that holds another version makes this one, bit by bit."""

    base_version: Annotated[int, Field(ge=0)]
    """The version it changes; a server that lacks it pulls the snapshot."""
    size_bytes: Annotated[int, Field(gt=0)]
    chunks: FileChunks
    frames: list[int]
    """Bytes of each tensor's zstd frame, in the order of the tensors that are no aliases. A frame
    has the XOR of the tensor's bytes with the base's, in planes: the first bytes of all values,
    then the second ones."""


class AdapterHeader(StrictMessage):
    """How the tensors of an adapter change the model: each layer by B A alpha / rank."""

    rank: Annotated[int, Field(gt=0)]
    """Rows of A, columns of B."""
    alpha: Annotated[float, Field(gt=0)]


class WeightManifest(StrictMessage):
    """Describes one published weight set; stored beside the data as `manifest.json`."""

    schema_version: Literal["1.0", "1.1", "1.2"] = "1.2"
    run_id: str
    policy: PolicyName = DEFAULT_POLICY
    """Whose weights they are."""
    policy_version: Annotated[int, Field(ge=0)]
    kind: Literal["dense", "adapter"] = "dense"
    """`dense` has every weight of the model, `adapter` the matrices of a LoRA adapter alone."""
    adapter: AdapterHeader | None = None
    """Of the kind `adapter`."""
    transport: TransportName = "file"
    location: str
    """Transport `file`: absolute path of the safetensors file. `http`: its name, which takes the
    place of the manifest's in the manifest's URL."""
    size_bytes: Annotated[int, Field(ge=0)]
    chunks: FileChunks | None = None
    """Transport `http`: of the safetensors file."""
    delta: WeightDelta | None = None
    """Transport `http`: what to pull instead, for who holds its base."""
    tensors: list[TensorEntry]

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind == "adapter") != (self.adapter is not None):
            raise ValueError(f"a manifest of the kind {self.kind!r} has adapter = {self.adapter}")
        return self


class LoadRequest(StrictMessage):
    """Body of `POST /weights/load`."""

    manifest_location: str
    """Transport `file`: absolute path of the manifest; `http`: its URL."""
    policy: PolicyName = DEFAULT_POLICY
    policy_version: Annotated[int, Field(ge=0)]


class LoadReply(StrictMessage):
    """Answer of `POST /weights/load`: the version the server now samples with."""

    policy_version: int
    fetch_s: float
    pause_s: float
    """Time generation stood still, in seconds."""


class CanaryRequest(StrictMessage):
    """Body of `POST /weights/canary`: score these tokens with the weights in use."""

    token_ids: Annotated[list[int], Field(min_length=2, fail_fast=True)]


class CanaryReply(StrictMessage):
    """Answer of `POST /weights/canary`."""

    policy_version: int
    logprobs: list[float]
    """[T-1] log-probability of token t+1 given tokens 0..t, temperature 1."""


class NewestVersion(StrictMessage):
    """The newest published version, kept in Redis under `weights:newest`."""

    policy_version: Annotated[int, Field(ge=0)]
    manifest_location: str | None = None
    """None for the weights every server starts with (the configured model)."""

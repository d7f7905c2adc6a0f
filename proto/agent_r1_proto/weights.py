"""Weight versions: how the learner's weights reach the rollout servers.

learner writes a snapshot and its manifest, sets the newest version in Redis, and POSTs
`LoadRequest` to `/weights/load` of every announced rollout server; servers pull. After a push
`CanaryRequest` to `/weights/canary` compares log-probabilities.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.policies import DEFAULT_POLICY, PolicyName

SNAPSHOT_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
DELTA_FILE = "delta.zst"
SHARED_FILE = "shared.json"
TransportName = Literal["file", "http", "collective"]
"""Transport of a version's bytes: through a folder that all see, over HTTP, or from the memory of
the learner into that of all servers at once."""


def _is_empty(value: list[int]) -> bool:
    return not value


class TensorEntry(StrictMessage):
    """One tensor of a snapshot."""

    name: str
    """Hugging Face parameter name; of an adapter, the name that PEFT gives it in a file."""
    shape: list[int]
    dtype: Literal["float32", "bfloat16", "float16"]
    alias_of: str | None = None
    """Name of the tensor that this one shares (tied embeddings); it has no bytes of its own."""


class FileChunks(StrictMessage):
    """The chunks of a file: each can be fetched from another source, and verified alone."""

    size_bytes: Annotated[int, Field(gt=0)]
    """Size of every chunk but the last, which has the rest."""
    sha256: list[str]
    """Checksums of the chunks, in order."""


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
    """Change of the model by an adapter: each layer by B A alpha / rank."""

    rank: Annotated[int, Field(gt=0)]
    """Rows of A, columns of B."""
    alpha: Annotated[float, Field(gt=0)]


class WeightManifest(StrictMessage):
    """Describes one published weight set; stored beside the data as `manifest.json`."""

    schema_version: Literal["2.0"] = "2.0"
    run_id: str
    policy: PolicyName = DEFAULT_POLICY
    """Policy that the weights belong to."""
    policy_version: Annotated[int, Field(ge=0)]
    kind: Literal["dense", "adapter"] = "dense"
    """`dense` has every weight of the model, `adapter` the matrices of a LoRA adapter alone."""
    adapter: AdapterHeader | None = None
    """Rank and scale of an adapter; None of dense weights."""
    transport: TransportName = "file"
    location: str
    """Path of the safetensors file (transport `file`); its name, which takes the place of the
    manifest's in the manifest's URL (`http`); address of the learner's store (`collective`)."""
    size_bytes: Annotated[int, Field(ge=0)]
    chunks: FileChunks | None = None
    """Chunks of the safetensors file; None with the transport `collective`, which has no file."""
    delta: WeightDelta | None = None
    """Delta to pull instead (transport `http`), for servers that hold its base."""
    tensors: list[TensorEntry]

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind == "adapter") != (self.adapter is not None):
            raise ValueError(f"a manifest of the kind {self.kind!r} has adapter = {self.adapter}")
        if (self.transport == "collective") != (self.chunks is None):
            raise ValueError(f"a manifest of the transport {self.transport!r} lacks its chunks")
        return self


Backend = Literal["gloo", "nccl", "ipc"]
"""Library that sends weights: gloo through host memory, nccl from GPU to GPU; with ipc, servers
read them in the learner's own GPU."""


class Invitation(StrictMessage):
    """Meeting point of servers and the learner, which then sends them a version."""

    host: str
    port: Annotated[int, Field(gt=0, le=65535)]
    group: str
    """Name of the process group; no other has it."""
    backend: Backend = "gloo"
    """Library that sends the version."""
    size_bytes: Annotated[int, Field(gt=0)]
    """Size of the safetensors file that is sent."""
    bucket_bytes: Annotated[int, Field(gt=0)]
    """Size of every piece but the last, which has the rest."""


class LoadRequest(StrictMessage):
    """Body of `POST /weights/load`."""

    manifest_location: str
    """Place of the manifest: its absolute path (transport `file`), its URL (`http`), or the address
    where groups meet, and the version (`collective`)."""
    policy: PolicyName = DEFAULT_POLICY
    policy_version: Annotated[int, Field(ge=0)]
    invitation: Annotated[Invitation | None, Field(exclude_if=lambda value: value is None)] = None
    """Transport `collective`: how to get it."""


class LoadReply(StrictMessage):
    """Answer of `POST /weights/load`: the version the server now samples with."""

    policy_version: int
    fetch_s: float
    pause_s: float
    """Time generation stood still, in seconds."""


@dataclass(frozen=True)
class ScoredPrompt:
    """One prompt of a `CanaryRequest`."""

    token_ids: list[int]
    """[T] at least two."""
    wanted: list[int]
    """[N] rising positions of the tokens that are scored, each from 1 to T-1."""


class CanaryRequest(StrictMessage):
    """Body of `POST /weights/canary`: score these tokens with the weights in use."""

    token_ids: Annotated[list[int], Field(min_length=2, fail_fast=True)]
    """[T] one prompt, or several end to end."""
    prompt_starts: Annotated[list[int], Field(exclude_if=_is_empty, fail_fast=True)] = []
    """Index of the first token of each prompt after the first one; [] for a single prompt."""
    wanted: Annotated[list[int], Field(exclude_if=_is_empty, fail_fast=True)] = []
    """[N] rising indices of the tokens whose log-probabilities are wanted, at least one of each
    prompt and never its first token; [] is all but the first token of each prompt."""

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        bounds = [0, *self.prompt_starts, len(self.token_ids)]
        for start, end in itertools.pairwise(bounds):
            if end - start < 2:
                raise ValueError(f"the prompt at {start} has {end - start} tokens; it needs 2")
        if any(later <= earlier for earlier, later in itertools.pairwise(self.wanted)):
            raise ValueError("wanted must rise")
        if self.wanted and sum(len(prompt.wanted) for prompt in self.prompts()) < len(self.wanted):
            raise ValueError(
                f"wanted names the first token of a prompt, or one outside 0..{bounds[-1] - 1}"
            )
        if not all(prompt.wanted for prompt in self.prompts()):
            raise ValueError("wanted has no token of one of the prompts; leave that prompt out")
        return self

    def prompts(self) -> list[ScoredPrompt]:
        """Return each prompt by itself, with the positions in it that are wanted."""
        bounds = itertools.pairwise([0, *self.prompt_starts, len(self.token_ids)])
        return [self._prompt(start, end) for start, end in bounds]

    def _prompt(self, start: int, end: int) -> ScoredPrompt:
        wanted = [index - start for index in self.wanted if start < index < end]
        return ScoredPrompt(
            self.token_ids[start:end], wanted if self.wanted else list(range(1, end - start))
        )


class CanaryReply(StrictMessage):
    """Answer of `POST /weights/canary`."""

    policy_version: int
    logprobs: list[float]
    """[N] log-probability of each wanted token given those of its prompt before it, temperature 1.
    """


class NewestVersion(StrictMessage):
    """The newest published version, kept in Redis under `weights:newest`."""

    policy_version: Annotated[int, Field(ge=0)]
    manifest_location: str | None = None
    """Path or URL of the manifest; None for the weights every server starts with (the configured
    model)."""

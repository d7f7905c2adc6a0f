"""The configuration tables that several services read, and the base class of all tables.

`agent_r1.config.run` joins these with each service's own tables into one run configuration; a
service gets the tables it needs as arguments and never reads files or the environment itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_r1.runtime.files.private import read_secret
from agent_r1_proto.addresses import hide_password as hide_password

LogFormat = Literal["text", "json"]
Dtype = Literal["float32", "bfloat16"]
OWN_ADDRESS = "auto"
"""`advertise_host` of a service that is to find out its address itself."""
REDIS_PASSWORD_VARIABLE = "AGENT_R1_REDIS_PASSWORD"
FOLDER_OR_NAME = "a folder or a name"
"""Marks a text that is a path where it looks like one, or where there is such a folder."""
FolderOrName = Annotated[str, FOLDER_OR_NAME]
RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


def split_password(url: str) -> tuple[str, str | None]:
    """Return a URL without its password, and the password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url, None
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    netloc = f"{user}@{host}" if user else host
    return urlunsplit(parts._replace(netloc=netloc)), unquote(parts.password)


class StrictConfig(BaseModel):
    """A table of `run.toml`: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunConfig(StrictConfig):
    """`[run]`: what the run is called, where it writes, how it is seeded."""

    id: Annotated[str, Field(pattern=RUN_ID_PATTERN)] = "run"
    """Names the run; everything in Redis lives under `agent_r1:{id}:`."""
    dir: Path | None = None
    """Run folder; None is `runs/{id}`."""
    seed: int = 0
    """Seeds prompt order, sampling and initialization."""
    deterministic: bool = False
    """Make a run repeatable on one machine, to the token: one sequence in the sampling engine at a
    time, no prefix cache, deterministic kernels in the learner. Much slower; for debugging."""
    tool_pool: Annotated[str, Field(pattern=RUN_ID_PATTERN)] | None = None
    """Pool whose tools the run calls and its own tools join; runs that name the same pool share
    them, and need the same token. None is a pool of the run's own."""
    token_file: Path | None = None
    """File with the token that the run's services require in every request and send to each other.
    The variable AGENT_R1_TOKEN holds the token itself instead. With neither, `agent-r1 train`,
    `evaluate` and `chat` make a token for as long as they run."""
    plugins: list[FolderOrName] = []
    """Places of user code, for every service: folders, which are put on its import path, and
    installed packages as requirements (`my-tools>=1.2`). Nothing is installed: what is missing is
    an error with the command that installs it."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level written to the logs."""
    log_format: LogFormat = "text"
    """`json` writes one object a line, with the ids of run, group and sample as fields."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Base URL of an OpenTelemetry collector (OTLP over HTTP, usually port 4318) that gets a trace
    of each sample; needs `pip install 'agent-r1[otel]'`. None traces nothing."""

    def folder(self) -> Path:
        """Return the run folder."""
        return self.dir if self.dir is not None else Path("runs") / self.id


class LoraConfig(StrictConfig):
    """`[model.lora]`: train a low-rank adapter of each target, and no other weight.

    The product of its two matrices, times alpha / rank, is added to the layer's weight. The layers
    themselves never change (LoRA, arXiv:2106.09685).
    """

    rank: Annotated[int, Field(ge=1, le=512)]
    """Rows of the first and columns of the second matrix of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of an adapter: what it adds is multiplied by alpha / rank, so that one learning rate
    suits every rank; it is about ten times the one for all weights."""
    targets: Annotated[list[str], Field(min_length=1)] = [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
    """Names of the linear layers that get an adapter, in every block of the model."""
    path: Path | None = None
    """Folder of the adapter that the run starts from, in the format of the library PEFT; None
    starts from one that adds nothing. `agent-r1 train --from` sets it."""


class ModelConfig(StrictConfig):
    """`[model]`: the policy that is trained."""

    path: FolderOrName
    """Hugging Face model directory, or `owner/name` of a model on the hub, downloaded once at the
    start. HF_HUB_OFFLINE=1 takes it from the hub's cache without asking the hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; None is its main branch. A commit never
    changes."""
    dtype: Dtype = "float32"
    """Number format of the weights in learner and rollout."""
    max_context: Annotated[int, Field(ge=16)] = 4096
    """Most tokens of one trajectory, prompt included."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation in the learner."""
    lora: LoraConfig | None = None
    """Train adapters of the layers in `targets` (LoRA, arXiv:2106.09685), and no other weight.
    Without this table, all weights are trained."""

    @property
    def policy(self) -> str:
        """Name of the policy: the folder of the adapter it starts from, else `path`."""
        return str(self.lora.path) if self.lora and self.lora.path else self.path


class RedisConfig(StrictConfig):
    """`[redis]`: the message broker."""

    url: str | None = None
    """Address of a server that runs already: redis://, rediss:// (TLS) or unix://. None starts a
    server for this run on the local machine."""
    password_file: Path | None = None
    """File with the password of that server. The variable AGENT_R1_REDIS_PASSWORD holds the
    password itself instead. A user name is part of the URL: rediss://user@host:6380/0."""
    ca_file: Path | None = None
    """rediss://: certificates (PEM) that vouch for the server; None is the system's."""
    maxmemory_mb: Annotated[int, Field(ge=16)] = 512
    """Memory limit given to a server this run starts, in MiB."""
    lease_s: Annotated[float, Field(gt=0)] = 30.0
    """A consumer that has not renewed its entries for this long loses them, in seconds."""
    max_processing_failures: Annotated[int, Field(ge=1)] = 3
    """Failed processings of one entry before it is dead-lettered."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if self.url is not None and not re.match(r"^(redis|rediss|unix)://", self.url):
            raise ValueError(
                f"redis.url ({hide_password(self.url)!r}) must start with redis://, rediss:// or "
                "unix://"
            )
        try:
            urlsplit(self.url or "").port  # noqa: B018 - raises
        except ValueError:
            raise ValueError(
                f"redis.url ({hide_password(self.url or '')!r}) has no port where one should be; "
                "write a password in it percent-encoded, or into the file of redis.password_file"
            ) from None
        if self.password_file is not None and (
            self.url is None or urlsplit(self.url).password is not None
        ):
            has = "is not set" if self.url is None else "holds a password itself"
            raise ValueError(
                f"redis.password_file ({self.password_file}) belongs to the server at redis.url, "
                f"which {has}; set the URL without a password, or remove password_file"
            )
        if self.ca_file is not None and not (self.url or "").startswith("rediss://"):
            raise ValueError(
                f"redis.ca_file ({self.ca_file}) needs a redis.url that starts with rediss://; "
                "correct the URL, or remove ca_file"
            )
        return self

    def connection_url(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the URL to connect to: `url` with the password and the certificates. A secret.

        Raises:
            ValueError: `url` is not set, or a file cannot be read.
        """
        if self.url is None:
            raise ValueError("redis.url is not set; give the address of the run's Redis server")
        parts = urlsplit(self.url)
        password = self._password(environ)
        if password is not None and parts.password is None:
            user, _, host = parts.netloc.rpartition("@")
            parts = parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}")
        if self.ca_file is not None:
            if not self.ca_file.is_file():
                raise ValueError(
                    f"redis.ca_file ({self.ca_file}) is not a file; name the PEM file of the "
                    "authority that signed the server's certificate"
                )
            authority = f"ssl_ca_certs={quote(str(self.ca_file))}"
            parts = parts._replace(query="&".join(filter(None, (parts.query, authority))))
        return urlunsplit(parts)

    def _password(self, environ: Mapping[str, str]) -> str | None:
        given = environ.get(REDIS_PASSWORD_VARIABLE)
        if given or self.password_file is None:
            return given or None
        remedy = "name a file with the password"
        return read_secret(self.password_file, "redis.password_file", remedy)


class ListenConfig(StrictConfig):
    """Address at which an HTTP service listens."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free port."""
    advertise_host: str | None = None
    """Host name other services use to reach this one; None is `host`, and "auto" the address from
    which this machine, or container, reaches others."""
    allowed_hosts: list[str] = []
    """Further names under which requests may call this service, and hosts whose web pages may. Its
    own names, addresses, names without a dot and names of a cluster (`*.svc`, `*.cluster.local`)
    need no entry."""

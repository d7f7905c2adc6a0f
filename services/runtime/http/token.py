"""The run token: the secret that lets a request into the HTTP services of a run.

`RunConfig.token_file` or the variable AGENT_R1_TOKEN names it; the local launcher makes one when
neither does. guard.py asks every request for it, and every client sends `token_headers`.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent_r1.runtime.config import RunConfig
from agent_r1.runtime.files.private import read_secret, write_private

TOKEN_VARIABLE = "AGENT_R1_TOKEN"
TOKEN_SOURCES = f"run.token_file or the variable {TOKEN_VARIABLE}"
TOKEN_RULE = "16 to 512 letters, digits and the characters . _ ~ + / = -"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_RANDOM_BYTES = 32


@dataclass(frozen=True)
class RunToken:
    """A token; its value appears in no `repr`."""

    value: str = field(repr=False)

    def admits(self, authorization: str) -> bool:
        """Say whether an `Authorization` header has the token, in a time that tells nothing."""
        scheme, _, sent = authorization.partition(" ")
        # As bytes: texts with other characters than ASCII cannot be compared.
        same = hmac.compare_digest(sent.strip().encode(), self.value.encode())
        return same and scheme.lower() == "bearer"


def token_headers(token: RunToken | None) -> dict[str, str]:
    """Return the headers that a client of the run's services sends; none without a token."""
    return {} if token is None else {"authorization": f"Bearer {token.value}"}


def find_token(run: RunConfig, environ: Mapping[str, str] = os.environ) -> RunToken | None:
    """Return the run's token: of the variable, else of the file; None where neither is set.

    Raises:
        ValueError: the file cannot be read, or what is given is no token.
    """
    if (text := environ.get(TOKEN_VARIABLE)) is not None:
        return _check(text, f"the variable {TOKEN_VARIABLE}")
    return None if run.token_file is None else read_token(run.token_file, "run.token_file")


def read_token(file: Path, key: str) -> RunToken:
    """Return the token in a file that a key names.

    Raises:
        ValueError: the file cannot be read, or holds no token.
    """
    text = read_secret(file, key, f"write one token of {TOKEN_RULE} to it")
    return _check(text, f"{key} ({file})")


def _check(text: str, where: str) -> RunToken:
    text = text.strip()
    if _TOKEN.fullmatch(text) is None:
        raise ValueError(
            f"{where} must hold one token of {TOKEN_RULE}, and holds something else "
            f"({len(text)} characters); make one with `openssl rand -hex 32`"
        )
    return RunToken(text)


def write_token(run: RunConfig, file: Path) -> None:
    """Write the run's token to a file for its owner alone; make one where none is given.

    Raises:
        ValueError: what is given is no token.
    """
    token = find_token(run) or RunToken(secrets.token_urlsafe(_RANDOM_BYTES))
    write_private(file, f"{token.value}\n")

"""The programs of deploy/docker, run outside a container."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

DOCKER = Path(__file__).resolve().parents[2] / "deploy" / "docker"
SECRETS_GIVEN = (
    "AGENT_R1_TOKEN",
    "REDIS_PASSWORD",
    "ELASTICSEARCH_PASSWORD",
    "GRAFANA_PASSWORD",
    "HF_TOKEN",
)


def programs(folder: Path, **scripts: str) -> str:
    """Write shell scripts into a folder; return a PATH that finds them first."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        file = folder / name.replace("_", "-")
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def run_init(folder: Path, **given: str) -> dict[str, Path]:
    """Run the first service of docker-compose.yml below a folder; return the secrets it wrote.

    `chown` is written down in `folder/chown.log`, because only root may use it.
    """
    script = (DOCKER / "init").read_text()
    places = ("secrets", "sandbox-secrets", "redis", "cache", "runs", "checkout")
    for place in places:
        (folder / place).mkdir(exist_ok=True)
    script = re.sub(rf"(?<!\w)/({'|'.join(places)})\b", rf"{folder}/\1", script)
    (folder / "checkout" / "pyproject.toml").touch()
    environment = {name: given.get(name, "") for name in SECRETS_GIVEN}
    path = programs(folder / "bin", chown=f'echo "$@" >> {folder}/chown.log')
    command = ["sh", "-c", script]
    subprocess.run(
        command, check=True, stderr=subprocess.PIPE, text=True, env=environment | {"PATH": path}
    )
    return {file.name: file for file in (folder / "secrets").iterdir()}

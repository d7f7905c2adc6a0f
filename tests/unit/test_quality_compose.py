"""docker-compose.yml on paper: all of it can be built or pulled, started, and asked if it is up.

Reads docker-compose.yml and the Dockerfiles it names; starts nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r1.cli import build_parser

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
PUBLIC_IMAGE = re.compile(r"[a-z0-9./-]+:[\w.-]+")


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_a_healthcheck(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= set(check)


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_has_a_dockerfile_or_a_pinned_public_name(name: str) -> None:
    service = SERVICES[name]
    if name in OURS:
        context = REPOSITORY / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).is_file()
    else:
        assert PUBLIC_IMAGE.fullmatch(service["image"])
        assert not service["image"].endswith(":latest")


@pytest.mark.parametrize("name", OURS)
def test_every_command_is_one_of_agent_r1_and_its_config_exists(name: str) -> None:
    arguments = build_parser().parse_args(OURS[name]["command"])
    assert (REPOSITORY / arguments.config).is_file()


@pytest.mark.parametrize("name", OURS)
def test_every_configuration_variable_is_a_known_key(name: str) -> None:
    from agent_r1.config import load_config

    arguments = build_parser().parse_args(OURS[name]["command"])
    load_config(REPOSITORY / arguments.config, environ=OURS[name]["environment"])


def test_services_wait_only_for_services_with_that_name() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)


def test_the_port_of_each_healthcheck_is_the_port_the_service_binds() -> None:
    for name in ("search", "reward", "rollout"):
        environment = SERVICES[name]["environment"]
        key = "TOOLS__SEARCH" if name == "search" else name.upper()
        port = environment[f"AGENT_R1__{key}__PORT"]
        assert f"127.0.0.1:{port}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("file", sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile")))
def test_everything_a_dockerfile_copies_exists_and_is_not_ignored(file: Path) -> None:
    kept = [
        line[1:]
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for line in file.read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (REPOSITORY / source).exists(), source
                assert source.split("/")[0] in kept, source

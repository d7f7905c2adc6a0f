"""docker-compose.yml on paper: all of it can be built or pulled, started, and asked if it is up.

Reads docker-compose.yml, deploy/compose.cpu.yml over it, and the Dockerfiles; starts nothing.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r1.cli import build_parser

REPOSITORY = Path(__file__).resolve().parents[2]


class _Loader(yaml.SafeLoader):
    """Reads compose's own tags: `!reset` takes a value away, `!override` replaces one."""


_Loader.add_constructor("!reset", lambda loader, node: None)
_Loader.add_constructor(
    "!override",
    lambda loader, node: loader.construct_sequence(node),  # pyright: ignore
)


def read(file: str) -> dict[str, Any]:
    """Read a compose file, with the defaults of its variables."""
    text = (REPOSITORY / file).read_text()
    return yaml.load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text), _Loader)


BASE: dict[str, dict[str, Any]] = read("docker-compose.yml")["services"]
CPU: dict[str, dict[str, Any]] = read("deploy/compose.cpu.yml")["services"]
ON_CPU = {
    name: {**service, **CPU.get(name, {})}
    | {"environment": service.get("environment", {}) | CPU.get(name, {}).get("environment", {})}
    for name, service in BASE.items()
}
SERVICES = {
    f"{name}-{kind}": s
    for kind, all_ in (("gpu", BASE), ("cpu", ON_CPU))
    for name, s in all_.items()
}
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
SERVING = {
    name: service
    for name, service in OURS.items()
    if service["command"][0] == "serve" and service["command"][2].endswith(".toml")
}
PUBLIC_IMAGE = re.compile(r"[a-z0-9./-]+:[\w.-]+")
JOBS = {"index-gpu", "index-cpu"}
"""They end by themselves."""


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - JOBS))
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
    served = OURS[name]["command"][-1].endswith(":PythonExec")  # a class, not a configuration
    assert name in JOBS or served or (REPOSITORY / arguments.config).is_file()


@pytest.mark.parametrize("name", SERVING)
def test_every_configuration_variable_is_a_known_key(name: str) -> None:
    from agent_r1.config import load_config

    arguments = build_parser().parse_args(OURS[name]["command"])
    load_config(REPOSITORY / arguments.config, environ=OURS[name]["environment"])


def test_services_wait_only_for_services_with_that_name() -> None:
    assert CPU.keys() <= BASE.keys()
    for service in BASE.values():
        assert set(service.get("depends_on", {})) <= BASE.keys()


def test_the_port_of_each_healthcheck_is_the_port_the_service_binds() -> None:
    for name in ("search", "reward", "rollout"):
        environment = BASE[name]["environment"]
        key = "TOOLS__SEARCH" if name == "search" else name.upper()
        port = environment[f"AGENT_R1__{key}__PORT"]
        assert f"127.0.0.1:{port}/healthz" in BASE[name]["healthcheck"]["test"][-1]


def test_gpus_are_asked_for_where_there_is_no_override() -> None:
    for name in ("rollout", "learner"):
        (device,) = BASE[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert ON_CPU[name]["deploy"] is None
        assert ON_CPU[name]["build"]["dockerfile"] == "deploy/docker/cpu.Dockerfile"


def test_containers_run_as_another_user_than_root() -> None:
    for file in sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile")):
        users = [line for line in file.read_text().splitlines() if line.startswith("USER ")]
        assert users == ["USER agent"], file


def test_tools_and_reward_come_without_torch() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for name in ("tools", "reward"):
        text = (REPOSITORY / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
        assert f'".[{name}]"' in text
        needed = " ".join(project["dependencies"] + project["optional-dependencies"][name])
        assert not re.search(r"torch|vllm|deepspeed", needed)


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

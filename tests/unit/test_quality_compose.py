"""docker-compose.yml on paper: all of it can be built or pulled, started, and asked if it is up.

Reads docker-compose.yml, the files of deploy/ over it, and the Dockerfiles; starts nothing.
"""

from __future__ import annotations

import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r1.cli.main import build_parser
from agent_r1_service.config import RunConfig
from agent_r1_service.http.token import find_token

REPOSITORY = Path(__file__).resolve().parents[2]


class _Loader(yaml.SafeLoader):
    """Reads compose's own tags: `!reset` takes a value away, `!override` replaces one."""


class _Override(dict[Any, Any]):
    """A mapping that replaces another."""


def _override(loader: yaml.SafeLoader, node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return _Override(loader.construct_mapping(node, deep=True))
    assert isinstance(node, yaml.SequenceNode)
    return loader.construct_sequence(node)


_Loader.add_constructor("!reset", lambda loader, node: None)
_Loader.add_constructor("!override", _override)


def read(file: str) -> dict[str, Any]:
    """Read a compose file, with the defaults of its variables."""
    text = (REPOSITORY / file).read_text()
    return yaml.load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text), _Loader)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay one file's services over another's; what is reset is gone."""
    merged: dict[str, Any] = {}
    for name, service in base.items():
        changes = over.get(name, {})
        merged[name] = {**service, **changes}
        environment = changes.get("environment", {})
        if not isinstance(environment, _Override):
            environment = service.get("environment", {}) | environment
        merged[name] = {
            key: value
            for key, value in (merged[name] | {"environment": environment}).items()
            if value is not None
        }
    return merged


BASE: dict[str, dict[str, Any]] = read("docker-compose.yml")["services"]
CPU: dict[str, dict[str, Any]] = read("deploy/compose.cpu.yml")["services"]
CODE: dict[str, dict[str, Any]] = read("deploy/compose.code.yml")["services"]
ON_CPU = merge(BASE, CPU)
FILES = {"gpu": BASE, "cpu": ON_CPU, "code-gpu": merge(BASE, CODE), "code-cpu": merge(ON_CPU, CODE)}
"""The files as they are put together; services that a profile leaves out stay in."""
SERVICES = {f"{name}-{kind}": s for kind, all_ in FILES.items() for name, s in all_.items()}
OURS = {name: service for name, service in SERVICES.items() if ":" not in service["image"]}
SERVING = {
    name: service
    for name, service in OURS.items()
    if service["command"][0] == "serve" and service["command"][2].endswith(".toml")
}
PUBLIC_IMAGE = re.compile(r"[a-z0-9./-]+:[\w.-]+")
JOBS = {f"{job}-{kind}" for job in ("index", "secrets") for kind in FILES}
"""They end by themselves."""


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - JOBS))
def test_every_service_has_a_healthcheck(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= set(check)


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_has_a_dockerfile_or_a_pinned_public_name(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        context = REPOSITORY / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).is_file()
    elif name not in OURS:
        assert PUBLIC_IMAGE.fullmatch(service["image"])
        assert not service["image"].endswith(":latest")


@pytest.mark.parametrize("kind", FILES)
def test_an_image_is_built_by_one_service_and_never_pulled_for_the_others(kind: str) -> None:
    # Of two builds one gives the image its name; a container made from the other is replaced by
    # the next `up`.
    started = [s for s in FILES[kind].values() if "search" not in s.get("profiles", [])]
    for image in {service["image"] for service in started if ":" not in service["image"]}:
        users = [service for service in started if service["image"] == image]
        builders = [service for service in users if "build" in service]
        assert len(builders) == 1, image
        assert "pull_policy" not in builders[0]
        others = [service for service in users if service not in builders]
        assert [service["pull_policy"] for service in others] == ["never"] * len(others)


@pytest.mark.parametrize("name", sorted(OURS.keys() - JOBS))
def test_every_service_is_told_to_stop_and_has_the_time_to(name: str) -> None:
    # Signals reach it through init and an ENTRYPOINT in exec form; compose's own 10 s are too short
    # for the sessions of a tool, a step of the learner and vLLM's engine.
    assert OURS[name]["init"] is True
    assert int(OURS[name]["stop_grace_period"].removesuffix("s")) >= 40


@pytest.mark.parametrize("file", sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile")))
def test_an_image_starts_the_command_itself_not_a_shell(file: Path) -> None:
    assert 'ENTRYPOINT ["agent-r1"]' in file.read_text().splitlines()


@pytest.mark.parametrize("kind", FILES)
def test_services_that_run_programs_may_make_sandboxes_and_have_limits(kind: str) -> None:
    for name in ("python", "code"):
        service = FILES[kind][name]
        assert "seccomp=deploy/docker/seccomp-python-exec.json" in service["security_opt"]
        assert {"mem_limit", "pids_limit"} <= set(service)
        assert service["volumes"] == ["secrets:/secrets:ro"]  # which no sandbox shows


@pytest.mark.parametrize("kind", ["code-gpu", "code-cpu"])
def test_a_run_with_code_tests_starts_and_names_nothing_of_search(kind: str) -> None:
    started = {n: s for n, s in FILES[kind].items() if "search" not in s.get("profiles", [])}
    ours = {"python", "code", "reward", "rollout", "learner"}
    assert started.keys() == {"secrets", "redis", *ours}
    for service in started.values():
        assert service.get("depends_on", {}).keys() <= started.keys()
        assert not [key for key in service["environment"] if "SEARCH" in key]
    assert "profiles" not in started["code"]


@pytest.mark.parametrize("name", OURS)
def test_every_command_is_one_of_agent_r1_and_its_config_exists(name: str) -> None:
    arguments = build_parser().parse_args(OURS[name]["command"])
    served = re.search(r":(PythonExec|CodeTests)$", OURS[name]["command"][-1])  # a class
    assert name in JOBS or served or (REPOSITORY / arguments.config).is_file()


@pytest.mark.parametrize("name", sorted(OURS.keys() - JOBS))
def test_every_service_has_the_token_before_it_starts(name: str) -> None:
    service = OURS[name]
    assert service["environment"]["AGENT_R1__RUN__TOKEN_FILE"] == "/secrets/token"
    assert "secrets:/secrets:ro" in service["volumes"]
    assert service["depends_on"]["secrets"] == {"condition": "service_completed_successfully"}


def test_the_token_is_written_once_and_for_the_services_alone(tmp_path: Path) -> None:
    (script,) = BASE["secrets"]["command"]
    script = script.replace("/secrets", str(tmp_path)).replace("chown", ": chown")
    assert BASE["secrets"]["entrypoint"] == ["sh", "-euc"]
    tokens = []
    for _ in range(2):
        subprocess.run(["sh", "-euc", script], check=True)
        tokens.append(find_token(RunConfig(token_file=tmp_path / "token"), {}))
    assert tokens[0] is not None
    assert tokens[0] == tokens[1]
    assert [file.name for file in tmp_path.iterdir()] == ["token"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", SERVING)
def test_every_configuration_variable_is_a_known_key(name: str) -> None:
    from agent_r1.config.run import load_config

    arguments = build_parser().parse_args(OURS[name]["command"])
    load_config(REPOSITORY / arguments.config, environ=OURS[name]["environment"])


def test_services_wait_only_for_services_with_that_name() -> None:
    assert CPU.keys() | CODE.keys() <= BASE.keys()
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
        assert "deploy" not in ON_CPU[name]
        assert ON_CPU[name]["image"] == "agent-r1-cpu"
    assert ON_CPU["rollout"]["build"]["dockerfile"] == "deploy/docker/cpu.Dockerfile"


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

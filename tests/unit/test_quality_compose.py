"""docker-compose.yml on paper: all of it can be built or pulled, started, and asked if it is up.

Reads docker-compose.yml, the files of deploy/ over it, and the Dockerfile; starts nothing. What is
for GPUs is parsed here and has run nowhere yet. `make test-docker` runs what is for CPUs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants as hub

from agent_r1.attempts.tool_client import COMPOSE_PROFILES
from agent_r1.cli.main import build_parser
from agent_r1.config.run import load_config
from agent_r1.runtime.config import OWN_ADDRESS
from agent_r1.tools.sandbox.code_tests import CodeTests
from agent_r1.tools.sandbox.python_exec import PythonExec
from agent_r1.tools.search.elasticsearch_client import FILE_SUFFIX, PASSWORD_VARIABLE, USER_VARIABLE
from tests.support.containers import run_init

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "deploy" / "docker" / "Dockerfile"
OBSERVE = REPOSITORY / "deploy" / "observe"
TOOLS_OF_PROFILES = ((PythonExec, "python"), (CodeTests, "code"))
URL_VARIABLE = "AGENT_R1__LEARNER__CHECKPOINT_URL"
GIVEN = {"PLUGINS": "./my_code", "TOOL": "my_tool"}
"""Variables that have no default."""


class _Loader(yaml.SafeLoader):
    """Reads compose's own tags: `!reset` takes a value away, `!override` replaces one."""


class _Mapping(dict[Any, Any]):
    """A mapping that replaces another."""


class _Sequence(list[Any]):
    """A sequence that replaces another."""


def _override(loader: yaml.SafeLoader, node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return _Mapping(loader.construct_mapping(node, deep=True))
    assert isinstance(node, yaml.SequenceNode)
    return _Sequence(loader.construct_sequence(node, deep=True))


_RESET = object()
_Loader.add_constructor("!reset", lambda loader, node: _RESET)
_Loader.add_constructor("!override", _override)


def _value(match: re.Match[str]) -> str:
    return GIVEN[match[1]] if match[2] == ":?" else match[3]


def read(file: str) -> dict[str, Any]:
    """Read a compose file, with the defaults of its variables."""
    text = (REPOSITORY / file).read_text()
    return yaml.load(re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", _value, text), _Loader)["services"]


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another as compose does; what is reset is gone."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, _Mapping | _Sequence) or key not in base:
            merged[key] = value
        elif isinstance(value, dict):
            merged[key] = merge(base[key], value)
        elif isinstance(value, list) and key == "volumes":
            merged[key] = [*base[key], *value]
        else:
            merged[key] = value
    return {key: value for key, value in merged.items() if value is not _RESET}


NAMES = {
    "gpu": [],
    "cpu": ["cpu"],
    "code-gpu": ["code"],
    "code-cpu": ["cpu", "code"],
    "plugins-gpu": ["plugins"],
    "plugins-cpu": ["cpu", "plugins"],
}
PATHS = {
    kind: ["docker-compose.yml", *(f"deploy/compose.{name}.yml" for name in names)]
    for kind, names in NAMES.items()
}
FILES: dict[str, dict[str, dict[str, Any]]] = {}
"""The files as they are put together; services that a profile leaves out stay in."""
for kind, paths in PATHS.items():
    FILES[kind] = {}
    for path in paths:
        FILES[kind] = merge(FILES[kind], read(path))
BASE, ON_CPU = FILES["gpu"], FILES["cpu"]
SERVICES = {f"{name}-{kind}": s for kind, all_ in FILES.items() for name, s in all_.items()}
OURS = {name: service for name, service in SERVICES.items() if "agent-r1" in service["image"]}
SERVING = {name: service for name, service in OURS.items() if service["command"][0] == "serve"}
PUBLIC_IMAGE = re.compile(r"[a-z0-9./-]+:[\w.-]+")
JOBS = {f"{job}-{kind}" for job in ("index", "init") for kind in FILES}
"""They end by themselves."""
ALL_TEXT = "".join(
    (REPOSITORY / path).read_text() for path in {p for ps in PATHS.values() for p in ps}
)
PASSED_ON = {name for name, value in BASE["learner"]["environment"].items() if value is None}
"""Variables that the learner gets as they are on the host, or not at all."""
WEIGHTS_DIR = "/weights/compose"
WEIGHTS_ALONE = {"AGENT_R1__LEARNER__WEIGHTS_DIR"}
"""Variables for services with weights, which the others ignore."""
SECRETS = set(re.findall(r"/secrets/([\w.-]+)", ALL_TEXT))


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - JOBS))
def test_every_service_has_a_healthcheck(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= set(check)


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_built_from_known_arguments_or_has_a_pinned_public_name(name: str) -> None:
    service = SERVICES[name]
    if name not in OURS:
        assert PUBLIC_IMAGE.fullmatch(service["image"])
        assert not service["image"].endswith(":latest")
    elif "build" in service:
        assert REPOSITORY / service["build"]["dockerfile"] == DOCKERFILE
        arguments = service["build"]["args"]
        assert arguments.keys() <= set(re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.M))
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        extras = arguments.get("EXTRAS", "").split()
        assert set(extras) <= project["optional-dependencies"].keys()
        lock = arguments.get("LOCK", "cpu")
        assert (REPOSITORY / "deploy" / "constraints" / f"{lock}.txt").is_file()


def test_the_image_below_a_rollout_server_has_the_release_of_vllm_that_the_project_names() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    image = BASE["rollout"]["build"]["args"]["BASE"]
    version = image.removeprefix("vllm/vllm-openai:v")
    assert f"vllm=={version}" in project["optional-dependencies"]["rollout-gpu"]


@pytest.mark.parametrize("kind", FILES)
def test_an_image_is_built_by_one_service_and_never_pulled_for_the_others(kind: str) -> None:
    # Of two builds one gives the image its name; a container made from the other is replaced by
    # the next `up`.
    started = [s for s in FILES[kind].values() if "search" not in s.get("profiles", [])]
    for image in {service["image"] for service in started if "agent-r1" in service["image"]}:
        users = [service for service in started if service["image"] == image]
        builders = [service for service in users if "build" in service]
        assert len(builders) == 1, image
        assert "pull_policy" not in builders[0]
        others = [service for service in users if service not in builders]
        assert [service["pull_policy"] for service in others] == ["never"] * len(others)


@pytest.mark.parametrize("name", sorted(SERVING))
def test_every_service_is_told_to_stop_and_has_the_time_to(name: str) -> None:
    # Signals reach it through init and an ENTRYPOINT in exec form; compose's own 10 s are too short
    # for the sessions of a tool, a step of the learner and vLLM's engine.
    assert SERVING[name]["init"] is True
    assert int(SERVING[name]["stop_grace_period"].removesuffix("s")) >= 40


@pytest.mark.parametrize("name", sorted(OURS))
def test_nothing_writes_into_an_image(name: str) -> None:
    assert OURS[name]["read_only"] is True
    assert OURS[name]["tmpfs"] == ["/tmp:exec,mode=1777"]


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_service_is_no_root_or_becomes_the_owner_of_a_folder_first(name: str) -> None:
    service = OURS[name]
    assert service["cap_drop"] == ["ALL"]
    if service.get("user") == "root":
        assert service["entrypoint"][0] == "/app/deploy/docker/as-owner-of"
        # With KILL, init (which stays root) may pass a stop on to another user's process.
        assert service["cap_add"] == ["KILL", "SETGID", "SETUID"]
        folder = service["entrypoint"][1]
        assert [m for m in service["volumes"] if m.removesuffix(":ro").endswith(f":{folder}")]
    else:
        assert service.get("user", "agent") == "agent"


@pytest.mark.parametrize("kind", FILES)
def test_services_that_run_programs_may_make_sandboxes_and_have_limits(kind: str) -> None:
    for name in ("python", "code", "agents"):
        service = FILES[kind][name]
        assert "seccomp=deploy/docker/seccomp-python-exec.json" in service["security_opt"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["cap_drop"] == ["ALL"]
        assert {"mem_limit", "pids_limit"} <= set(service)
        code = [one for one in service["volumes"] if not one.endswith(":/plugins:ro")]
        assert code == ["sandbox-secrets:/secrets:ro"]  # which no sandbox shows


def test_services_that_run_programs_start_with_a_profile_each() -> None:
    profiles = {"python": ["python"], "code": ["code"]}
    for kind in ("gpu", "cpu", "plugins-gpu", "plugins-cpu"):
        services = FILES[kind]
        assert {name: services[name]["profiles"] for name in profiles} == profiles
        # The tool is up before the run asks for it, where its profile is on.
        for name in profiles:
            condition = {"condition": "service_healthy", "required": False}
            assert services["rollout"]["depends_on"][name] == condition
    named = {class_.name: profile for class_, profile in TOOLS_OF_PROFILES}
    assert named == COMPOSE_PROFILES


@pytest.mark.parametrize("kind", FILES)
def test_without_their_profile_no_agents_start_and_nobody_waits_for_them(kind: str) -> None:
    services = FILES[kind]
    with_agents = {name for name, one in services.items() if "agent" in one.get("profiles", [])}
    assert with_agents == {"gateway", "agents"}
    for name in services.keys() - with_agents:
        assert not with_agents & services[name].get("depends_on", {}).keys()
    assert services["gateway"]["depends_on"]["agents"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("kind", ["code-gpu", "code-cpu"])
def test_a_run_with_code_tests_starts_and_names_nothing_of_search(kind: str) -> None:
    left_out = {"search", "observe", "python", "agent"}
    started = {n: s for n, s in FILES[kind].items() if not left_out & set(s.get("profiles", []))}
    ours = {"code", "reward", "rollout", "learner"}
    assert started.keys() == {"init", "redis", "console", *ours}
    for service in started.values():
        assert service.get("depends_on", {}).keys() <= started.keys()
        assert not [key for key in service.get("environment", {}) if "__SEARCH__" in key]
    assert "profiles" not in started["code"]


@pytest.mark.parametrize("kind", FILES)
def test_the_console_reads_the_runs_and_is_reached_from_this_machine_alone(kind: str) -> None:
    console = FILES[kind]["console"]
    arguments = build_parser().parse_args(console["command"])
    assert (arguments.command, arguments.runs, arguments.host) == ("ui", "runs", "0.0.0.0")
    assert console["ports"] == [f"127.0.0.1:8700:{arguments.port}"]
    assert f"127.0.0.1:{arguments.port}/healthz" in console["healthcheck"]["test"][-1]
    assert "./runs:/app/runs:ro" in console["volumes"]
    assert console["environment"]["AGENT_R1__RUN__TOKEN_FILE"] == "/secrets/token"


@pytest.mark.parametrize("name", sorted(SERVING.keys() | {n for n in OURS if n in JOBS}))
def test_every_command_is_one_of_agent_r1_and_its_config_exists(name: str) -> None:
    arguments = build_parser().parse_args(OURS[name]["command"])
    if name not in JOBS and not re.search(r":\w+$", str(arguments.config)):  # a class
        file = str(arguments.config)
        assert file == "/plugins/run.toml" or (REPOSITORY / file).is_file()


@pytest.mark.parametrize("name", sorted(SERVING))
def test_every_service_has_the_secrets_before_it_starts(name: str) -> None:
    service = SERVING[name]
    assert service["environment"]["AGENT_R1__RUN__TOKEN_FILE"] == "/secrets/token"
    assert service["environment"]["AGENT_R1__REDIS__PASSWORD_FILE"] == "/secrets/redis-password"
    assert [mount for mount in service["volumes"] if mount.endswith("secrets:/secrets:ro")]
    assert service["depends_on"]["init"] == {"condition": "service_completed_successfully"}


def test_every_secret_that_is_named_is_one_that_the_first_service_writes(tmp_path: Path) -> None:
    written = run_init(tmp_path, HF_TOKEN="hf_0123456789")
    observed = re.findall(r"/secrets/([\w.-]+)", (OBSERVE / "prometheus.yml").read_text())
    assert SECRETS | set(observed) == written.keys()


@pytest.mark.parametrize("name", sorted(SERVING))
def test_every_variable_of_a_service_is_known_to_it(name: str, tmp_path: Path) -> None:
    service = SERVING[name]
    known = {USER_VARIABLE, PASSWORD_VARIABLE + FILE_SUFFIX, "TOKENIZERS_PARALLELISM"}
    known |= {"HOME", "USER", "ROLLOUT_GPUS"}  # of libc, and of deploy/docker/rollout-servers
    known |= {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR"}
    environment = {k: v for k, v in service["environment"].items() if k not in PASSED_ON}
    for variable in environment:
        ours = variable.startswith("AGENT_R1__")
        assert ours or variable in known or hasattr(hub, variable), variable
    arguments = build_parser().parse_args(service["command"])
    file, options = Path(arguments.config), list(arguments.options)
    if str(file) == "/plugins/run.toml":
        file = tmp_path / "run.toml"
        file.write_text('model.path = "org/model"\n[tools.my_tool]\ntype = "mine:MyTool"\n')
    if re.search(r":\w+$", str(arguments.config)):  # a class: `serve` names its table
        name = {"PythonExec": "python_exec", "CodeTests": "code_tests"}[str(file).split(":")[1]]
        file, options = None, [f"tools.{name}.type={arguments.config}", "model.path=none"]
    else:
        file = REPOSITORY / file
    if arguments.service in ("gateway", "agents"):  # for runs with such a table
        options.append('agent.command=["true"]')
    config = load_config(file, options, environ=environment).config
    if not name.startswith("tool"):
        assert (config.learner.transport, str(config.learner.weights_dir)) == ("file", WEIGHTS_DIR)


def test_the_learner_alone_gets_the_variables_of_a_store_of_checkpoints() -> None:
    table = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    documented = set(re.findall(r"`((?:AWS|GOOGLE|AZURE)_\w+)`", table))
    # A file of the host would not be in the container.
    assert documented - {"GOOGLE_SERVICE_ACCOUNT"} | {URL_VARIABLE} == PASSED_ON
    for name, service in SERVICES.items():
        found = PASSED_ON & service.get("environment", {}).keys()
        assert found == (PASSED_ON if name.startswith("learner") else set())


def test_services_wait_only_for_services_with_that_name() -> None:
    for services in FILES.values():
        for service in services.values():
            assert set(service.get("depends_on", {})) <= services.keys()


@pytest.mark.parametrize("name", sorted(n for n in SERVING if not n.startswith("learner")))
def test_the_port_of_each_healthcheck_is_the_port_the_service_binds(name: str) -> None:
    service = SERVING[name]
    text = json.dumps(service["environment"]) + " ".join(service["command"]).replace(".", "__")
    ports = set(re.findall(r"(?i)(?<!wire)__port\W+(\d+)", text))
    check = service["healthcheck"]["test"]
    if check[1].endswith("/rollout-servers"):  # reads the port from the environment
        assert check[2] == "--healthy"
    else:
        assert ports == {re.findall(r"127.0.0.1:(\d+)/healthz", check[-1])[0]}


@pytest.mark.parametrize("name", sorted(SERVING))
def test_each_of_several_containers_is_announced_by_its_own_address(name: str) -> None:
    service = SERVING[name]
    named = {k: v for k, v in service["environment"].items() if k.endswith("__ADVERTISE_HOST")}
    options = [word for word in service["command"] if ".advertise_host=" in word]
    given = [*named.values(), *(word.partition("=")[2] for word in options)]
    assert given == [OWN_ADDRESS] * (2 if name.startswith("gateway") else 1)  # two ports
    assert not {"container_name", "hostname", "ports"} & service.keys()


@pytest.mark.parametrize("kind", FILES)
def test_rollout_servers_read_weights_in_memory_that_the_learner_alone_writes(kind: str) -> None:
    assert "weights:/weights" in FILES[kind]["learner"]["volumes"]
    assert "weights:/weights:ro" in FILES[kind]["rollout"]["volumes"]
    [options] = re.findall(r"(?<=  weights:\n    driver_opts: ){.*}", ALL_TEXT)
    volume = yaml.safe_load(options)
    assert (volume["type"], "mode=1777" in volume["o"]) == ("tmpfs", True)  # users of their own
    # On GPUs, they also share the folder of downloaded models. A folder without a volume's name is
    # each container's own.
    mounts = [
        {m for m in FILES[kind][name]["volumes"] if ":" in m and not m.endswith(":ro")}
        for name in ("learner", "rollout")
    ]
    assert set.intersection(*mounts) == (set() if kind.endswith("cpu") else {"cache:/cache"})


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_folder_that_is_named_to_a_service_is_one_that_it_has(name: str) -> None:
    service = OURS[name]
    mounts = [re.sub(r"^[^:]*:|:ro$", "", mount) for mount in service["volumes"]]
    places = ("/tmp", "/app", *mounts)
    environment = service.get("environment", {})
    if not name.startswith(("learner", "rollout")):
        environment = {k: v for k, v in environment.items() if k not in WEIGHTS_ALONE}
    for variable, value in environment.items():
        assert not str(value).startswith("/") or value.startswith(places), (variable, value)


def test_one_request_asks_for_all_gpus_and_variables_say_which_are_used() -> None:
    # A list in a variable would be one device with that name under CDI. `init` comes before all
    # others: a machine without GPUs is told at once.
    for name in ("init", "rollout", "learner"):
        (device,) = BASE[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    for kind in ("gpu", "code-gpu", "plugins-gpu"):
        learner, rollout = (FILES[kind][name]["environment"] for name in ("learner", "rollout"))
        assert learner["CUDA_VISIBLE_DEVICES"] == rollout["ROLLOUT_GPUS"] == "0"
        # nvidia-smi counts in this order.
        assert learner["CUDA_DEVICE_ORDER"] == rollout["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    for name in ("rollout", "learner"):
        assert ON_CPU[name]["image"].startswith("agent-r1-cpu:")
    assert not [name for name, service in ON_CPU.items() if "deploy" in service]


@pytest.mark.parametrize("name", [n for n in SERVICES if n.startswith("redis-")])
def test_redis_keeps_everything_and_asks_for_a_password(name: str) -> None:
    command = SERVICES[name]["command"]
    for option, value in (
        ("--appendonly", "yes"),
        ("--maxmemory-policy", "noeviction"),
        ("--aclfile", "/secrets/redis.acl"),
    ):
        assert command[command.index(option) + 1] == value


def test_images_that_bring_vllm_take_transformers_from_the_lock() -> None:
    build = BASE["rollout"]["build"]["args"]
    script = [sys.executable, str(REPOSITORY / "deploy" / "docker" / "requirements.py")]
    arguments = [str(REPOSITORY / "pyproject.toml"), build["EXTRAS"], build["PROVIDED"]]
    done = subprocess.run([*script, *arguments], capture_output=True, text=True, check=True)
    names = {re.split(r"[^\w-]", line)[0] for line in done.stdout.split()}
    assert "transformers" in names
    assert "vllm" not in names
    assert "-c /lists/lock.txt" in DOCKERFILE.read_text()


# --- The image -----------------------------------------------------------------------------------


def test_an_image_starts_the_command_itself_not_a_shell_and_not_as_root() -> None:
    lines = DOCKERFILE.read_text().splitlines()
    assert 'ENTRYPOINT ["agent-r1"]' in lines
    assert [line for line in lines if line.startswith("USER ")] == ["USER agent"]


def test_packages_are_installed_before_any_code_is_copied() -> None:
    text = DOCKERFILE.read_text()
    code = [text.index(f"COPY {folder} {folder}") for folder in ("proto", "services", "deploy")]
    assert text.index("-r /lists/requirements.txt") < min(code)
    assert text.index("-r /lists/lock.txt") < min(code)
    copied = re.findall(r"^COPY (?:--\S+ )?(.*) \S+$", text, re.M)
    sources = [word for line in copied for word in line.split()]
    assert [s for s in set(sources) if sources.count(s) > 1] == ["pyproject.toml"]


def requirements_of(name: str) -> list[str]:
    arguments = BASE[name]["build"]["args"]
    script = DOCKERFILE.with_name("requirements.py")
    project = REPOSITORY / "pyproject.toml"
    words = (arguments.get("EXTRAS", ""), arguments.get("PROVIDED", ""))
    command = [sys.executable, str(script), str(project), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_an_image_gets_the_packages_of_its_service() -> None:
    packages = {
        name: {re.split(r"[<>=\[;]", line)[0] for line in requirements_of(name)}
        for name in ("search", "reward", "gateway", "console", "rollout", "learner")
    }
    assert all("fastapi" in names for names in packages.values())
    for name in ("search", "reward", "gateway", "learner"):  # vLLM brings it along
        assert "opentelemetry-sdk" in packages[name]
    assert {"tantivy", "sqlalchemy"} <= packages["search"]
    assert {"deepspeed", "datasets"} <= packages["learner"]  # it reads the tasks, too
    assert {"pyarrow", "tokenizers"} <= packages["console"]
    for name in ("search", "reward", "console"):
        assert not packages[name] & {"torch", "vllm", "deepspeed", "transformers"}
    assert {"openai", "transformers"} <= packages["gateway"]
    assert not packages["gateway"] & {"torch", "vllm", "deepspeed"}
    # Its image brings vLLM.
    assert "zstandard" in packages["rollout"]
    assert "vllm" not in packages["rollout"]


def test_everything_the_dockerfile_copies_exists_and_is_not_ignored() -> None:
    rules = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in rules if line.startswith("!")]
    for line in DOCKERFILE.read_text().splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            sources = [word for word in line.split()[1:-1] if not word.startswith("--")]
            for source in (word.replace("${LOCK}", "cpu") for word in sources):
                assert (REPOSITORY / source).exists(), source
                assert source.split("/")[0] in kept, source


# --- Variables, and what watches -----------------------------------------------------------------


def test_the_example_of_env_has_every_variable_with_its_default() -> None:
    example = dict(re.findall(r"^#(\w+)=(.*)$", (REPOSITORY / ".env.example").read_text(), re.M))
    named = {
        name: (kind, value)
        for name, kind, value in re.findall(r"\$\{(\w+)(:[-?])([^}]*)\}", ALL_TEXT)
    }
    assert example.keys() == named.keys() | PASSED_ON
    base = (REPOSITORY / "docker-compose.yml").read_text()
    for name, (_, default) in named.items():
        ours = re.search(rf"\$\{{{name}:-([^}}]+)\}}", base)
        if ours is not None:
            default = ours[1]
            assert example[name] == default


def test_prometheus_asks_every_container_of_every_service() -> None:
    settings = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    jobs = {job.pop("job_name"): job for job in settings["scrape_configs"]}
    token = {"type": "Bearer", "credentials_file": "/secrets/token"}
    assert all(job["authorization"] == token for job in jobs.values())
    named: set[str] = set()
    for job in ("tools", "reward", "gateway"):
        (found,) = jobs[job]["dns_sd_configs"]
        assert (found["type"], found["port"]) == ("A", 8001)
        named |= set(found["names"])
    assert named == {"search", "python", "code", "tool", "agents", "reward", "gateway"}
    assert named <= FILES["plugins-gpu"].keys()
    learner = FILES["gpu"]["learner"]["environment"]
    port = learner["AGENT_R1__LEARNER__SERVER__PORT"]
    assert jobs["learner"]["static_configs"] == [{"targets": [f"learner:{port}"]}]
    (rollout,) = jobs["rollout"]["http_sd_configs"]
    assert (rollout["url"], rollout["authorization"]) == (f"http://learner:{port}/targets", token)
    # The others of the learner's answer are asked by their names.
    (only,) = jobs["rollout"]["relabel_configs"]
    assert only == {"source_labels": ["job"], "regex": "rollout", "action": "keep"}
    assert settings["rule_files"] == ["alerts.yml"]
    mounts = FILES["gpu"]["prometheus"]["volumes"]
    for name in ("prometheus.yml", "alerts.yml"):
        assert f"./deploy/observe/{name}:/etc/prometheus/{name}:ro" in mounts


@pytest.mark.parametrize("kind", FILES)
def test_compose_itself_accepts_the_files(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("needs the docker command with its compose plugin")
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    files = [word for path in PATHS[kind] for word in ("-f", str(REPOSITORY / path))]
    command = [docker, "compose", *files, "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    services = json.loads(done.stdout)["services"]
    # What the tests above read is what compose makes of the files.
    assert services.keys() == FILES[kind].keys()
    for name, service in FILES[kind].items():
        assert services[name]["image"] == service["image"]
        assert services[name].get("environment", {}) == service.get("environment", {})
        assert services[name].get("command") == service.get("command")
        mounts = {mount["target"] for mount in services[name].get("volumes", [])}
        assert mounts == {
            mount.removesuffix(":ro").split(":")[-1] for mount in service.get("volumes", [])
        }

"""deploy/k8s on paper: what the chart names exists in the code, and helm accepts every values file.

Reads the chart as text, and as helm renders it where helm is found; starts nothing. `make test-k8s`
runs it on a cluster.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
import yaml
from huggingface_hub import constants as hub
from pydantic import BaseModel

from agent_r1.cli.main import build_parser
from agent_r1.config.estimate import disk_parts, read_model_size, total, value_bytes
from agent_r1.config.run import Config, load_config
from agent_r1.learner.engine.ranks.rank_env import VARIABLES
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED, EXIT_LOSSES, EXIT_REASON
from agent_r1.runtime.http.guard import OPEN_PATHS
from agent_r1.tools.loading import import_tool_class
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.elasticsearch_client import FILE_SUFFIX, PASSWORD_VARIABLE, USER_VARIABLE
from agent_r1_proto.connection import Keys
from tests.support.public_models import SHAPES, write_shape

REPOSITORY = Path(__file__).resolve().parents[2]
KUBERNETES = REPOSITORY / "deploy" / "k8s"
CHART = KUBERNETES / "chart"
VALUES = {file.stem: file for file in sorted((KUBERNETES / "values").glob("*.yaml"))}
OVER = ("agent", "sandboxes", "spot")
ALONE = {name: [name] for name in VALUES if name not in OVER} | {"default": []}
SETS = ALONE | {
    "cpu-sandboxes": ["cpu", "sandboxes"],
    "cpu-agent": ["cpu", "agent"],
    "gpu-node-spot": ["gpu-node", "spot"],
}
"""The files as they are used: some are laid over others."""
TEMPLATES = {file.name: file.read_text() for file in sorted((CHART / "templates").iterdir())}
TEXT = "".join(TEMPLATES.values())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
COMPOSE = (REPOSITORY / "docker-compose.yml").read_text()
DOCKERFILE = (REPOSITORY / "deploy" / "docker" / "Dockerfile").read_text()
OBSERVE = REPOSITORY / "deploy" / "observe"
OF_NO_SERVICE = {"redis", "elasticsearch", "copy", "stop-learner", "console"}
NAMESPACE, RELEASE = "there", "mine"


KUBERAY = {
    file.stem: yaml.safe_load(file.read_text())
    for file in sorted((KUBERNETES / "kuberay").glob("*.yaml"))
}


def values_of(name: str) -> dict[str, Any]:
    return yaml.safe_load(VALUES[name].read_text())


# --- As text -------------------------------------------------------------------------------------


def has_key(model: type[BaseModel], path: list[str]) -> bool:
    """Say whether a table of the configuration has a key."""
    name, *below = path
    if model is Config and name == "tools":
        return has_key(SearchConfig, below[1:])
    if name not in model.model_fields:
        return False
    inner: Any = model.model_fields[name].annotation
    if get_origin(inner) is UnionType:  # a table that may be left out
        inner = get_args(inner)[0]
    is_table = isinstance(inner, type) and issubclass(inner, BaseModel)
    return not below or (is_table and has_key(inner, below))


def test_every_variable_of_the_configuration_is_a_key_of_it() -> None:
    texts = (file.read_text() for file in VALUES.values())
    everything = "".join([TEXT, *texts, json.dumps(KUBERAY)])
    named = set(re.findall(r"\bAGENT_R1__([A-Z0-9_]+)\b", everything))
    assert {"RUN__ID", "ENGINE__RANKS", "ROLLOUT__SERVER_ID"} <= named
    for name in named:
        assert has_key(Config, name.lower().split("__")), name


def test_images_and_their_ports_are_those_of_docker_compose() -> None:
    texts = [json.dumps(DEFAULTS), *(json.dumps(values_of(name)) for name in VALUES)]
    ours = {name for text in texts for name in re.findall(r"\bagent-r1-(?:\w+)(?=\")", text)}
    built = set(re.findall(r"\bagent-r1-(\w+):", COMPOSE)) | {"cpu"}
    images = {name for name in ours if not name.startswith("agent-r1-store")}
    assert images - {"agent-r1-learner", "agent-r1-rollout"} <= {f"agent-r1-{n}" for n in built}
    for store in ("redis", "elasticsearch"):
        assert f"image: {DEFAULTS[store]['image']}" in COMPOSE
    ports = set(re.findall(r"containerPort: (\d+)", TEXT)) - {"6379", "9200", "29500"}
    assert ports == set(re.findall(r"EXPOSE (\d+)", DOCKERFILE))


def test_configurations_classes_and_corpora_are_there() -> None:
    for values in (DEFAULTS, *map(values_of, VALUES)):
        config = values.get("run", {}).get("config")
        assert config is None or (REPOSITORY / config).is_file()
        for name, tool in values.get("tools", {}).items():
            if tool.get("class"):
                assert import_tool_class(tool["class"], "class").name == name


def test_exit_statuses_mean_what_the_learner_means_by_them() -> None:
    lines = re.findall(r"action: (\w+), onExitCodes: .*values: \[([\d, ]+)\]", TEXT)
    assert {action: json.loads(f"[{codes}]") for action, codes in lines} == {
        "Ignore": [EXIT_INTERRUPTED, 128 + signal.SIGTERM],
        "FailJob": [EXIT_REASON, EXIT_LOSSES],
    }


def test_probes_ask_what_needs_no_token_and_ranks_get_their_variables() -> None:
    assert set(re.findall(r'"ready" "([^"]+)"|path: (/\w+),', TEXT)) <= {
        pair for path in OPEN_PATHS for pair in ((path, ""), ("", path))
    }
    for variable in VARIABLES:
        assert f"name: {variable}" in TEMPLATES["learner.yaml"]


def test_the_scaler_reads_the_stream_of_samples() -> None:
    (stream,) = re.findall(r"stream: (\S+ \S+ \S+)", TEXT)
    assert stream.replace("{{ $.Release.Name }}", RELEASE) == Keys(RELEASE).tasks


def test_the_profile_that_the_sandboxes_name_is_the_one_that_is_put_on_the_nodes() -> None:
    profile = DEFAULTS["sandbox"]["seccompProfile"]["localhostProfile"]
    manifest = (KUBERNETES / "seccomp-profile.yaml").read_text()
    assert f"/seccomp/{Path(profile).parent}/" in manifest
    (source,) = re.findall(rf"--from-file {Path(profile).name}=(\S+)", manifest)
    assert (REPOSITORY / source).is_file()


def test_dashboards_and_alerts_of_the_chart_are_those_of_everybody() -> None:
    assert (CHART / "files" / "alerts.yml").resolve() == OBSERVE / "alerts.yml"
    assert (CHART / "files" / "dashboards").resolve() == OBSERVE / "grafana" / "dashboards"


@pytest.mark.parametrize(
    "name", ["default", *(name for name in VALUES if "run" in values_of(name))]
)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_volumes_hold_what_the_estimate_says(name: str, algorithm: str, tmp_path: Path) -> None:
    values = {} if name == "default" else values_of(name)
    file = values.get("run", DEFAULTS["run"])["config"]
    config = load_config(REPOSITORY / file, [f"learner.algorithm={algorithm}"], environ={}).config
    folder = Path(config.model.path)
    if config.model.path in SHAPES:
        folder = write_shape(config.model.path, tmp_path / "model")
    size = read_model_size(folder)
    runs = DEFAULTS["runs"] | values.get("runs", {})
    if runs["enabled"]:
        critic = size if config.learner.has_critic else None
        assert total(disk_parts(config, size, critic)) <= bytes_of(runs["size"])
    rollout = DEFAULTS["rollout"] | values.get("rollout", {})
    # Two versions, as values.yaml says.
    weights = 2 * size.weights * value_bytes(config.model.dtype)
    assert weights <= bytes_of(rollout["weightsSize"])


def bytes_of(quantity: str) -> float:
    """Return the bytes of a size as Kubernetes writes it."""
    number, unit = quantity[:-2], quantity[-2:]
    return float(number) * {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


# --- KubeRay -------------------------------------------------------------------------------------


def test_ray_serves_on_kubernetes_what_it_serves_elsewhere() -> None:
    elsewhere = yaml.safe_load((REPOSITORY / "deploy" / "ray" / "serve.yaml").read_text())
    here = yaml.safe_load(KUBERAY["rayservice"]["spec"]["serveConfigV2"])
    here["http_options"]["host"] = elsewhere["http_options"]["host"]
    for application in here["applications"]:
        assert application["args"]["redis_url"] == "redis://run-redis:6379/0"
        application["args"]["redis_url"] = "redis://redis:6379/0"
    assert here == elsewhere


def test_the_job_of_ray_is_a_command_whose_ranks_have_nodes() -> None:
    job, cluster = KUBERAY["rayjob"]["spec"], KUBERAY["raycluster"]
    arguments = build_parser().parse_args(job["entrypoint"].split()[1:])
    file = REPOSITORY / Path(arguments.config).relative_to("/app")
    config = load_config(file, arguments.options, environ={}).config
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert group["replicas"] == config.engine.ranks
    assert job["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}


def test_nodes_of_ray_have_the_image_and_the_release_of_the_lock() -> None:
    lock = (REPOSITORY / "deploy" / "constraints" / "cpu.txt").read_text()
    (version,) = re.findall(r"^ray==(\S+)", lock, re.M)
    for spec in (KUBERAY["raycluster"]["spec"], KUBERAY["rayservice"]["spec"]["rayClusterConfig"]):
        assert spec["rayVersion"] == version
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            (container,) = group["template"]["spec"]["containers"]
            assert (
                container["image"] == f"agent-r1-cpu:{DEFAULTS['image']['tag']}"
            )  # the whole lock


# --- As helm renders it --------------------------------------------------------------------------


def helm(*arguments: str) -> str:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("needs the helm command")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(names: list[str], *options: str) -> list[dict[str, Any]]:
    files = [word for name in names for word in ("--values", str(VALUES[name]))]
    where = ["--namespace", NAMESPACE, "--kube-version", "1.34"]
    text = helm("template", RELEASE, str(CHART), *where, *files, *options)
    return [one for one in yaml.safe_load_all(text) if one]


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specifications of all pods by the component that they are."""
    return {
        one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"][
            "template"
        ]["spec"]
        for one in objects
        if one["kind"] in ("Deployment", "StatefulSet", "Job")
    }


@pytest.mark.parametrize("kind", SETS)
def test_helm_lints_every_values_file(kind: str) -> None:
    files = [word for name in SETS[kind] for word in ("--values", str(VALUES[name]))]
    helm("lint", "--strict", str(CHART), *files)


@pytest.mark.parametrize("kind", SETS)
def test_every_service_is_a_command_that_starts_with_its_variables(kind: str) -> None:
    known = {USER_VARIABLE, PASSWORD_VARIABLE + FILE_SUFFIX, "TOKENIZERS_PARALLELISM"}
    known |= {"HOME", "USER", "TORCHINDUCTOR_CACHE_DIR", *VARIABLES}
    pods = pods_of(render(SETS[kind]))
    assert {"rollout", "reward", "search", "learner"} <= pods.keys()
    for component, pod in pods.items():
        if component in OF_NO_SERVICE:
            continue
        (container,) = pod["containers"]
        environment = {one["name"]: one.get("value", "x") for one in container["env"]}
        assert len(environment) == len(container["env"]), "a variable is given twice"
        for variable in environment:
            ours = variable.startswith("AGENT_R1__")
            assert ours or variable in known or hasattr(hub, variable), variable
        arguments = build_parser().parse_args(container["args"])
        assert arguments.command == "serve"
        file, options = arguments.config, list(arguments.options)
        if re.search(r":\w+$", str(file)):  # a class: `serve` names its table
            name = component.replace("-", "_")
            file, options = None, [f"tools.{name}.type={file}", "model.path=none"]
        else:
            file = REPOSITORY / file
        config = load_config(file, options, environ=environment).config
        tool = config.tools.get(component.replace("-", "_"))
        tables = {
            "rollout": config.rollout,
            "reward": config.reward,
            "learner": config.learner.server,
            "gateway": config.agent and config.agent.gateway,
            "agents": config.agent and config.agent.service,
        }
        listen = tables.get(component, tool)
        assert listen is not None
        assert listen.port == container["ports"][0]["containerPort"]
        assert (config.run.id, config.learner.transport) == (RELEASE, "http")


@pytest.mark.parametrize("kind", SETS)
def test_every_pod_is_restricted_has_limits_and_no_rights(kind: str) -> None:
    for component, pod in pods_of(render(SETS[kind])).items():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["allowPrivilegeEscalation"] is False
            # Elasticsearch writes into folders of its image.
            assert security.get("readOnlyRootFilesystem") is (component != "elasticsearch" or None)
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
        if component != "stop-learner":  # which may suspend the Job of the learner
            assert pod["automountServiceAccountToken"] is False


def test_pods_with_gpus_get_the_runtime_class_and_shared_memory_that_they_need() -> None:
    classes = [f"{name}.runtimeClassName=nvidia" for name in ("rollout", "learner")]
    pods = pods_of(render(["gpu-node"], "--set", ",".join(classes)))
    assert {name for name, pod in pods.items() if "runtimeClassName" in pod} == {
        "rollout",
        "learner",
    }
    for name in ("rollout", "learner"):
        assert pods[name]["runtimeClassName"] == "nvidia"
        (memory,) = [one["emptyDir"] for one in pods[name]["volumes"] if one["name"] == "shm"]
        assert memory == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert "runtimeClassName" not in json.dumps(render(["gpu-node"]))
    (learner,) = pods["learner"]["containers"]
    # A file for one GPU names a smaller share, and pods share none.
    assert {"name": "AGENT_R1__ENGINE__GPU_MEMORY_SHARE", "value": "1.0"} in learner["env"]


def test_secrets_are_files_or_references() -> None:
    text = json.dumps(render(["cpu"]))
    assert "PASSWORD" in text
    assert not re.search(r'"name": "\w*(TOKEN|PASSWORD)", "value"', text)


def test_redis_gets_its_password_and_nothing_else_as_a_file() -> None:
    (redis,) = [
        one["spec"]["template"]["spec"]
        for one in render(["cpu"])
        if one["kind"] == "StatefulSet" and one["metadata"]["name"] == f"{RELEASE}-redis"
    ]
    assert "env" not in redis["containers"][0]
    (secrets,) = [volume["secret"] for volume in redis["volumes"] if volume["name"] == "secrets"]
    assert secrets["items"] == [{"key": "redis-password", "path": "redis-password"}]
    mounts = {mount["name"]: mount["mountPath"] for mount in redis["containers"][0]["volumeMounts"]}
    assert mounts["secrets"] == "/secrets"


def learner_job(*options: str) -> str:
    (name,) = [
        one["metadata"]["name"]
        for one in render(["cpu"], *options)
        if one["kind"] == "Job"
        and "learner-" in one["metadata"]["name"].removeprefix(RELEASE)
        and "stop" not in one["metadata"]["name"]
    ]
    return name


def test_the_learner_has_another_job_if_and_only_if_something_of_it_changes() -> None:
    name = learner_job()
    unrelated = ("tools.search.tag=2", "redis.maxmemory=1gb", "reward.tag=2")
    assert {learner_job("--set-string", one) for one in unrelated} == {name}
    of_learner = ("image.tag=2", "learner.tag=3", "env.X=1", "run.toml=a=1")
    others = {learner_job("--set-string", one) for one in of_learner}
    others.add(learner_job("--set", "learner.pods=3"))
    assert learner_job("--set", "rollout.replicas=3") == name
    assert len(others | {name}) == len(of_learner) + 2


def test_weights_may_be_sent_from_the_learner_to_rollout_servers_whose_network_lets_them() -> None:
    options = ("--set", "learner.transport=collective", "--set", "networkPolicies.enabled=true")
    found = render([], *options)
    for pod in pods_of(found).values():
        for container in pod["containers"]:
            environment = {one["name"]: one.get("value") for one in container.get("env", [])}
            assert environment.get("AGENT_R1__LEARNER__TRANSPORT", "collective") == "collective"
    policies = {one["metadata"]["name"]: one["spec"] for one in found if "Policy" in one["kind"]}
    both = [policies[f"{RELEASE}-{name}-weights"] for name in ("learner", "rollout")]
    selected = [{"podSelector": one["podSelector"]} for one in both]
    for one in both:  # all ports: a group of torch takes those that it likes
        assert one["ingress"] == [{"from": selected}]
    without = render([], "--set", "networkPolicies.enabled=true")
    assert not [one for one in without if one["metadata"]["name"].endswith("-weights")]


def test_agents_and_their_gateway_are_there_if_and_only_if_somebody_asked() -> None:
    policies = ("--set", "networkPolicies.enabled=true")
    before = {(one["kind"], one["metadata"]["name"]) for one in render(["cpu"], *policies)}
    found = {
        (one["kind"], one["metadata"]["name"]): one for one in render(["cpu", "agent"], *policies)
    }
    added = {key: found[key] for key in found.keys() - before}
    assert before <= found.keys() | {("Job", learner_job())}  # that of another configuration
    assert {key for key in added if key[0] != "Job"} == {
        ("Deployment", f"{RELEASE}-gateway"),
        ("Deployment", f"{RELEASE}-agents"),
        ("PodDisruptionBudget", f"{RELEASE}-gateway"),
        ("PodDisruptionBudget", f"{RELEASE}-agents"),
        ("NetworkPolicy", f"{RELEASE}-agents"),
        ("NetworkPolicy", f"{RELEASE}-wire"),
    }


def test_agents_run_in_sandboxes_and_they_alone_reach_the_port_of_sessions() -> None:
    found = render(["cpu", "agent"], "--set", "networkPolicies.enabled=true")
    pods = pods_of(found)
    profile = DEFAULTS["sandbox"]["seccompProfile"]
    assert pods["agents"]["securityContext"]["seccompProfile"] == profile
    assert pods["gateway"]["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    (container,) = pods["gateway"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    port = int(environment["AGENT_R1__AGENT__WIRE__PORT"])
    policies = {one["metadata"]["name"]: one["spec"] for one in found if "Policy" in one["kind"]}
    entry = policies[f"{RELEASE}-wire"]["ingress"]
    agents, gateway = (policies[f"{RELEASE}-{name}"]["podSelector"] for name in ("agents", "wire"))
    assert entry == [{"from": [{"podSelector": agents}], "ports": [{"port": port}]}]
    exits = policies[f"{RELEASE}-agents"]["egress"]
    assert exits[1:] == [{"to": [{"podSelector": gateway}], "ports": [{"port": port}]}]
    assert {one["port"] for one in exits[0]["ports"]} == {6379, 53}
    open_to_all = policies[f"{RELEASE}-services"]["ingress"][0]["ports"]
    assert open_to_all == [{"port": 8001}]


def test_the_console_asks_the_first_rank_of_the_learner_if_somebody_asked_for_it() -> None:
    assert "console" not in pods_of(render(["cpu"]))
    options = ("--set", "console.enabled=true")
    (container,) = pods_of(render(["cpu"], *options))["console"]["containers"]
    arguments = build_parser().parse_args(container["args"])
    address = f"{learner_job(*options)}-0.{RELEASE}-learner.{NAMESPACE}.svc"
    assert arguments.runs == f"http://{address}:8001"
    assert arguments.port == container["ports"][0]["containerPort"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["AGENT_R1__RUN__TOKEN_FILE"] == "/secrets/token"
    # No index of SQLite in the folder of models, which may be a network share.
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/tmp"]
    assert environment["XDG_CACHE_HOME"] == "/tmp"
    assert mount["name"] == "tmp"
    assert learner_job(*options) == learner_job()


def test_ranks_are_the_pods_of_the_job_times_those_of_each() -> None:
    (job,) = [
        one
        for one in render(["large-cluster"])
        if one["kind"] == "Job" and "parallelism" in one["spec"]
    ]
    container = job["spec"]["template"]["spec"]["containers"][0]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    # 2 nodes with 8 GPUs each
    assert (job["spec"]["completions"], container["resources"]["limits"]["nvidia.com/gpu"]) == (
        2,
        8,
    )
    assert environment["AGENT_R1__ENGINE__RANKS"] == "16"
    assert {"--nnodes=2", "--nproc-per-node=8"} <= set(container["command"])
    assert "WORLD_SIZE" not in environment  # torchrun sets it


OBSERVED = ("observe.dashboards.enabled=true", "observe.rules.enabled=true")


def observing(*options: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is there for Grafana and for the Prometheus operator, by kind and name."""
    found: dict[str, dict[str, dict[str, Any]]] = {"ConfigMap": {}, "PrometheusRule": {}}
    for one in render(["cpu"], *(word for option in options for word in ("--set", option))):
        if "dashboard" in one["metadata"]["name"] or one["kind"] == "PrometheusRule":
            found[one["kind"]][one["metadata"]["name"]] = one
    return found


def test_grafana_finds_every_dashboard_as_it_is() -> None:
    maps = observing(*OBSERVED)["ConfigMap"]
    files = {file.stem: file for file in OBSERVE.glob("grafana/dashboards/*.json")}
    assert maps.keys() == {f"{RELEASE}-dashboard-{name}" for name in files}
    for name, file in files.items():
        one = maps[f"{RELEASE}-dashboard-{name}"]
        assert one["data"] == {f"agent-r1-{name}.json": file.read_text()}
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_prometheus_operator_gets_the_alerts_with_their_own_templates() -> None:
    label = "observe.rules.labels.release=prometheus"
    (rule,) = observing(*OBSERVED, label)["PrometheusRule"].values()
    assert rule["spec"] == yaml.safe_load((OBSERVE / "alerts.yml").read_text())
    assert "{{ $labels.job }}" in json.dumps(rule["spec"])
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_nothing_is_there_for_grafana_where_nobody_asked() -> None:
    assert observing() == {"ConfigMap": {}, "PrometheusRule": {}}


def test_a_packaged_chart_has_dashboards_and_alerts(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        kept = {name: archive.extractfile(name) for name in archive.getnames()}
    for name, file in kept.items():
        assert file is not None, name  # no link: what it names is not in the package
    assert "agent-r1/files/alerts.yml" in kept
    assert "agent-r1/files/dashboards/learning.json" in kept


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("rollout.replica=2", "'replica' not allowed"),
        ("image.tag=latest", "/image/tag"),
        ("redis.enabled=false", "redis.enabled is false: set redis.url to your server"),
        ("runs.enabled=false", "set learner.checkpointUrl, or nothing of the run is kept"),
    ],
)
def test_a_mistake_in_the_values_is_named(option: str, said: str) -> None:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("needs the helm command")
    command = [program, "template", RELEASE, str(CHART), "--kube-version", "1.34", "--set", option]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert said in done.stderr

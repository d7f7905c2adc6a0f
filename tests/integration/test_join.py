"""A service joins a run of which its host has nothing but the address of Redis and the token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli.main import main
from agent_r1.cli.services import join as join_module
from agent_r1.cli.services.join import join
from agent_r1.cli.services.pull_bundle import BundlePart, BundlePuller
from agent_r1.config.run import Config, dump_config, load_config
from agent_r1.gateway.config import AgentConfig
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.server import serve_learner
from agent_r1.learner.weights.publisher import make_transport
from agent_r1.learner.weights.run_bundle import RunOffer
from agent_r1.runtime import fingerprint
from agent_r1.runtime.http.token import RunToken
from agent_r1.weights.download import pull_client
from agent_r1_proto.registry import Registry
from agent_r1_proto.run_bundle import BundleFile, RunBundle
from agent_r1_proto.streams import Broker
from agent_r1_proto.weights import FileChunks
from tests.support.config_scene import RUN_TOML, search_of, write_scene

pytestmark = pytest.mark.redis

TOKEN = "the-token-of-this-test"
WAIT_S = 60.0
PLUGIN = 'NAME = "plugin"\n'


class Spec:
    """What `RunOffer` reads of a run."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.resolved_config = dump_config(config)[0]
        self.folder = self
        self.path = folder


@contextmanager
def learner(
    config: Config, redis_url: str, folder: Path, *, transport: str = "http"
) -> Iterator[None]:
    """Offer a run, as its learner does, from another thread."""
    folder.mkdir(parents=True, exist_ok=True)
    spec: Any = Spec(config, folder)
    up, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    learner_config = LearnerConfig(transport=transport)  # pyright: ignore[reportArgumentType]

    async def offer() -> None:
        async with (
            await Broker.connect(redis_url, config.run.id) as broker,
            serve_learner(learner_config.server, RunToken(TOKEN)) as server,
            make_transport(learner_config, server) as open_transport,
        ):
            await RunOffer(spec, Registry(broker), open_transport).prepare()
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(offer(),))
    thread.start()
    try:
        assert up.wait(WAIT_S)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        loop.close()


@pytest.fixture
def scene(tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The run as its learner's host has it, with a plugin; this host has the token."""
    folder = tmp_path / "learner"
    code = folder / "code" / "package"
    code.mkdir(parents=True)
    (code / "__init__.py").touch()
    (code / "thing.py").write_text(PLUGIN)
    (folder / "code" / ".env").write_text("SECRET=1")
    toml = RUN_TOML.replace('id = "demo"', f'id = "{run_id}"\nplugins = ["code"]')
    toml += '\n[tools.calculator]\ntype = "calculator"\n\n[rollout]\nhost = "10.9.9.9"\nport = 8\n'
    file = write_scene(folder, toml)
    monkeypatch.setenv("AGENT_R1_TOKEN", TOKEN)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "joining"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "joining").mkdir()
    return load_config(file, environ={}).config


def test_a_rollout_server_gets_model_and_plugins(scene: Config, redis_url: str, tmp_path: Path):
    with learner(scene, redis_url, tmp_path / "run"):
        joined = join(scene.run.id, "rollout", redis_url, ["rollout.port=0"])
    model, theirs = Path(joined.model.path), Path(scene.model.path)
    assert model.is_relative_to(tmp_path / "joining")
    assert {file.name: file.read_bytes() for file in model.iterdir()} == {
        file.name: file.read_bytes() for file in theirs.iterdir()
    }
    (plugins,) = map(Path, joined.run.plugins)
    code = [str(path.relative_to(plugins)) for path in plugins.rglob("*") if path.is_file()]
    assert sorted(code) == ["package/__init__.py", "package/thing.py"]  # nothing that is hidden
    assert (plugins / "package" / "thing.py").read_text() == PLUGIN
    assert (joined.redis.url, joined.rollout.host, joined.rollout.port) == (
        redis_url,
        "127.0.0.1",
        0,
    )
    assert joined.learner == scene.learner
    # The others' files stay where they are.
    assert search_of(joined).corpus == search_of(scene).corpus


@pytest.fixture
def with_agent(scene: Config) -> Config:
    """The same run, with an agent whose key and files this host has not."""
    agent = AgentConfig(
        command=["true"], env={"API_KEY": "secret"}, show=[Path("/proc/self/status")]
    )
    return scene.model_copy(update={"agent": agent.model_copy(update={"show": ["/not/here"]})})


def test_a_gateway_gets_the_tokenizer_and_listens_for_services_and_agents(
    with_agent: Config, redis_url: str, tmp_path: Path
):
    with learner(with_agent, redis_url, tmp_path / "run"):
        joined = join(with_agent.run.id, "gateway", redis_url, [])
    names = {file.name for file in Path(joined.model.path).iterdir()}
    assert "tokenizer.json" in names
    assert "model.safetensors" in {file.name for file in Path(with_agent.model.path).iterdir()}
    assert "model.safetensors" not in names
    assert joined.agent is not None
    assert (joined.agent.gateway.host, joined.agent.wire.host) == ("127.0.0.1", "127.0.0.1")


def test_agents_join_with_what_this_host_gives_them(
    with_agent: Config, redis_url: str, tmp_path: Path
):
    own = ['agent.env={API_KEY = "own"}', "agent.show=[]"]
    with learner(with_agent, redis_url, tmp_path / "run"):
        joined = join(with_agent.run.id, "agents", redis_url, own)
    (plugins,) = map(Path, joined.run.plugins)
    assert plugins.is_relative_to(tmp_path / "joining")
    assert joined.agent is not None
    assert (joined.agent.command, joined.agent.env) == (["true"], {"API_KEY": "own"})
    assert joined.served_tools()["agents"].host == "127.0.0.1"


def test_a_tool_gets_its_corpus_and_no_model(scene: Config, redis_url: str, tmp_path: Path):
    with learner(scene, redis_url, tmp_path / "run"):
        joined = join(scene.run.id, "search", redis_url, [])
    corpus = search_of(joined).corpus
    assert corpus is not None
    assert corpus.is_relative_to(tmp_path / "joining")
    assert json.loads(corpus.read_text())["title"] == "There"
    assert not list((tmp_path / "joining").rglob("*.safetensors"))
    assert joined.tools["search"].host == "127.0.0.1"


def test_what_this_host_has_itself_must_be_the_same(
    scene: Config, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = tmp_path / "own"
    (own / "package").mkdir(parents=True)
    (own / "package" / "__init__.py").touch()
    (own / "package" / "thing.py").write_text(PLUGIN)
    options = [f"run.plugins={json.dumps([str(own)])}"]
    with learner(scene, redis_url, tmp_path / "run"):
        joined = join(scene.run.id, "reward", redis_url, options)
        assert joined.run.plugins == [str(own)]
        (own / "package" / "thing.py").write_text(PLUGIN + "# changed\n")
        with pytest.raises(ValueError, match=r"run\.plugins .* differs .* in package/thing\.py"):
            join(scene.run.id, "reward", redis_url, options)


def test_another_version_of_the_code_is_refused(
    scene: Config, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with learner(scene, redis_url, tmp_path / "run"):
        monkeypatch.setattr(join_module, "software_version", lambda: "9.9.9 (code 0)")
        with pytest.raises(ValueError, match=r"this host has 9\.9\.9 \(code 0\); install the same"):
            join(scene.run.id, "rollout", redis_url, [])


def test_another_build_of_a_package_is_refused(
    scene: Config, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = scene.run.model_copy(update={"plugins": ["rich>=14"]})
    with learner(scene.model_copy(update={"run": run}), redis_url, tmp_path / "run"):
        assert join(scene.run.id, "reward", redis_url, []).run.plugins == ["rich>=14"]
        monkeypatch.setattr("agent_r1.cli.services.pull_bundle.package_hash", lambda _: "0")
        with pytest.raises(ValueError, match="another build of it than the learner's"):
            join(scene.run.id, "reward", redis_url, [])


def test_a_wrong_token_is_named(
    scene: Config, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with learner(scene, redis_url, tmp_path / "run"):
        monkeypatch.setenv("AGENT_R1_TOKEN", "some-other-token-than-that")
        with pytest.raises(ValueError, match="does not accept this host's token"):
            join(scene.run.id, "rollout", redis_url, [])


def test_a_run_with_a_shared_folder_says_what_to_set(scene: Config, redis_url: str, tmp_path: Path):
    with (
        learner(scene, redis_url, tmp_path / "run", transport="file"),
        pytest.raises(ValueError, match=r'learner\.transport = "file".*set it to "http"'),
    ):
        join(scene.run.id, "rollout", redis_url, [])


def test_a_file_that_the_learner_lacks_is_named(scene: Config, redis_url: str, tmp_path: Path):
    corpus = search_of(scene).corpus
    assert corpus is not None
    corpus.unlink()
    with learner(scene, redis_url, tmp_path / "run"):
        join(scene.run.id, "calculator", redis_url, [])
        with pytest.raises(ValueError, match=r"cannot give tools\.search\.corpus: .*No such file"):
            join(scene.run.id, "search", redis_url, [])


def names_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize("path", ["../elsewhere", "/elsewhere", "inside/../../elsewhere"])
async def test_no_file_is_written_outside_of_the_folder(path: str, tmp_path: Path):
    file = BundleFile(
        part="model",
        path=path,
        sha256="0" * 64,
        size_bytes=1,
        chunks=FileChunks(size_bytes=1, sha256=["0"]),
    )
    bundle = RunBundle(run_id="r", config={}, packages={}, files=[file], missing={})
    async with pull_client(None) as client:
        puller = BundlePuller(client, "http://127.0.0.1:1", bundle, {}, tmp_path / "here")
        with pytest.raises(ValueError, match="a file outside of its folder"):
            await puller.bring(BundlePart("model", ("model", "path")), {"model": {}})
    assert "elsewhere" not in names_below(tmp_path)


def test_a_service_waits_for_the_learner(
    scene: Config, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found: list[Config] = []
    joining = threading.Thread(
        target=lambda: found.append(join(scene.run.id, "reward", redis_url, []))
    )
    joining.start()
    said = ""
    while "waiting: no learner says how to join" not in said:
        assert joining.is_alive()
        said += capsys.readouterr().out
    with learner(scene, redis_url, tmp_path / "run"):
        joining.join(WAIT_S)
    assert found[0].reward == scene.reward.model_copy(update={"host": "127.0.0.1"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout"], "name a CONFIG, or the run to join"),
        (["rollout", "run.toml", "--join", "x"], "name a CONFIG, or the run to join"),
        (["rollout", "run.toml", "--redis", "redis://h"], "--redis goes with --join"),
        (["learner", "--join", "x"], "a run has one learner"),
        (["rollout", "--join", "x"], "--join needs the address of the run's Redis"),
        (["rollout", "--join", "x", "--redis", "redis://:secret@h"], "holds a password"),
    ],
)
def test_what_the_command_lacks_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "secret" not in error


def test_a_service_that_the_run_has_not_is_refused_with_those_it_has(
    scene: Config, redis_url: str, tmp_path: Path
):
    with (
        learner(scene, redis_url, tmp_path / "run"),
        pytest.raises(ValueError, match=r"cannot serve 'serch'.*\(calculator, search\)"),
    ):
        join(scene.run.id, "serch", redis_url, [])


def test_the_version_of_the_code_changes_with_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def version_of(text: str) -> str:
        (tmp_path / "some_code" / "module.py").write_text(text)
        fingerprint.software_version.cache_clear()
        return fingerprint.software_version()

    (tmp_path / "some_code").mkdir()
    (tmp_path / "some_code" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fingerprint, "CODE", ("some_code",))
    assert version_of("a = 1\n") == version_of("a = 1\n") != version_of("a = 2\n")
    fingerprint.software_version.cache_clear()

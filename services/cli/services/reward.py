"""`agent-r1 reward swap`: another model for a reward component that asks one.

Reads and writes the run's Redis: of a run that is running (its folder), or named by --redis and
--id.
"""

from __future__ import annotations

import argparse
import os

import httpx

from agent_r1.cli.live_run import add_run, ask_run
from agent_r1.config.live_run import ANSWER_TIMEOUT_S
from agent_r1.config.sources import ConfigError, variable_of
from agent_r1.reward.components import ASKING
from agent_r1_proto.scoring_models import ScoringModel, ScoringModels


def swap_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `reward swap`."""
    add_run(parser)
    parser.add_argument("component", metavar="COMPONENT", help=", ".join(ASKING))
    parser.add_argument("--model", required=True, metavar="NAME", help="what its server calls it")
    parser.add_argument("--url", metavar="URL", help="URL of its server, as in reward.*.url")


def swap(arguments: argparse.Namespace) -> int:
    """Let another model score new groups.

    Groups that the old one has begun to score keep it: stop its server once `agent-r1 status`
    shows that it is no longer used. A version that was used before needs no --url.
    """
    component, version = arguments.component, arguments.model
    if component not in ASKING:
        raise ConfigError(
            f"component ({component!r}) asks no model; those that do are {', '.join(ASKING)}"
        )

    async def change(models: ScoringModels) -> str:
        known = {one.version: one.url for one in await models.read(component)}
        if not known:
            raise ConfigError(
                f"no reward service of this run asks a model for {component}; name it in "
                "reward.components when you start the run"
            )
        url = arguments.url or known.get(version)
        if url is None:
            raise ConfigError(
                f"--model {version!r} is new to this run, which knows {', '.join(known)}; say "
                "where it is with --url"
            )
        _check_server(component, version, url)
        await models.swap(component, ScoringModel(version=version, url=url))
        return url

    url = ask_run(arguments, lambda broker: change(ScoringModels(broker)))
    print(f"{component} asks {version} at {url} from now on; groups keep the version they have")
    return 0


def _check_server(component: str, version: str, url: str) -> None:
    """Check that a server has a model.

    Raises:
        ConfigError: it does not answer, or has others.
    """
    below = "/v1/models" if component == "critic" else "/models"
    variable = variable_of(("reward", "servers", component, "api_key"))
    key = os.environ.get(variable)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}{below}", headers=headers, timeout=ANSWER_TIMEOUT_S)
        answer.raise_for_status()
        names = [str(one["id"]) for one in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as exc:
        raise ConfigError(
            f"--url ({url}) does not say which models it has ({type(exc).__name__}: {exc}); start "
            f"the server, or correct the address; a key for it goes into {variable}"
        ) from exc
    if version not in names:
        raise ConfigError(
            f"--model {version!r} is not served at {url}, which has {', '.join(names) or 'none'}"
        )

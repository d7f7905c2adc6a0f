"""Which weights this server samples with, and how it gets newer ones.

app.py hands in the learner's `LoadRequest`s; worker.py asks to catch up with the registry's newest
version before it starts samples. Both end in `Policy.load_weights`, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pydantic import ValidationError

from agent_r1.rollout.policy import Policy, WeightsRefusedError
from agent_r1_proto.weights import LoadReply, LoadRequest, NewestVersion, WeightManifest

logger = logging.getLogger(__name__)


class OlderVersionError(ValueError):
    """A load was asked for of a version older than the one in use."""


class WeightVersions:
    """The policy's weights as numbered versions.

    Args:
        policy: loads weights and scores tokens.
        run_id: snapshots of another run are refused.
    """

    def __init__(self, policy: Policy, run_id: str) -> None:
        self._policy = policy
        self._run_id = run_id
        self._lock = asyncio.Lock()
        self._last_load: LoadReply | None = None
        self.changed = asyncio.Event()
        """Set after every load; whoever announces the version clears it."""

    @property
    def held(self) -> int:
        """Version in use."""
        return self._policy.policy_version

    async def load(self, request: LoadRequest) -> LoadReply:
        """Load a version; for one that is in use already, answer what its load took.

        Raises:
            OlderVersionError: the server holds a newer one.
            WeightsRefusedError: manifest or snapshot cannot be used; the old weights stay in use.
            EngineDeadError: the engine failed.
        """
        async with self._lock:
            if request.policy_version < self.held:
                raise OlderVersionError(
                    f"policy_version ({request.policy_version}) is older than {self.held}, which "
                    "this server holds; versions are never reused within a run, so publish a "
                    "higher one"
                )
            if request.policy_version == self.held:
                return self._last_load or LoadReply(
                    policy_version=self.held, fetch_s=0.0, pause_s=0.0
                )
            manifest = await asyncio.to_thread(self._read_manifest, request)
            timing = await self._policy.load_weights(manifest)
            self.changed.set()
            logger.info(
                "weights loaded policy_version=%d fetch_s=%.3f pause_s=%.3f",
                self.held,
                timing.fetch_s,
                timing.pause_s,
            )
            self._last_load = LoadReply(
                policy_version=self.held, fetch_s=timing.fetch_s, pause_s=timing.pause_s
            )
            return self._last_load

    async def catch_up(self, newest: NewestVersion) -> None:
        """Load the newest version if the server is behind it.

        Raises:
            WeightsRefusedError, EngineDeadError: as `load`.
        """
        if newest.policy_version <= self.held:
            return
        if newest.manifest_location is None:
            raise WeightsRefusedError(
                f"version {newest.policy_version} is announced without a manifest; only version 0, "
                "the configured model, has none"
            )
        logger.info("server is behind held=%d policy_version=%d", self.held, newest.policy_version)
        request = LoadRequest(
            manifest_location=newest.manifest_location, policy_version=newest.policy_version
        )
        try:
            await self.load(request)
        except OlderVersionError:  # a push came in between
            return

    async def score(self, token_ids: list[int]) -> tuple[int, list[float]]:
        """Return the version in use and its [T-1] log-probabilities of the tokens."""
        async with self._lock:
            logprobs = await self._policy.score(token_ids)
            return self.held, logprobs

    def _read_manifest(self, request: LoadRequest) -> WeightManifest:
        path = Path(request.manifest_location)
        try:
            manifest = WeightManifest.model_validate_json(path.read_bytes())
        except OSError as exc:
            raise WeightsRefusedError(f"the manifest {path} cannot be read: {exc}") from exc
        except ValidationError as exc:
            raise WeightsRefusedError(f"the manifest {path} does not parse: {exc}") from exc
        if manifest.run_id != self._run_id:
            raise WeightsRefusedError(
                f"the manifest {path} is of the run {manifest.run_id!r}; this server serves "
                f"{self._run_id!r}"
            )
        if manifest.policy_version != request.policy_version:
            raise WeightsRefusedError(
                f"the manifest {path} is of version {manifest.policy_version}; asked for "
                f"{request.policy_version}"
            )
        return manifest

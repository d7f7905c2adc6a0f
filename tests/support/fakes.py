"""Stand-ins that behave like the real parts: a scripted sampler, a tool server, a small tokenizer.

They record what they were asked, so that a test looks at that instead of at mocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agent_r1.rollout.policy import EngineWork, LoadTiming
from agent_r1.runtime.http.token import RunToken
from agent_r1.text.tokens import EngineDeadError, Generation, PromptTooLongError
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tools import CallReply, CallRequest, ToolCall, ToolResult, ToolSpec
from agent_r1_proto.trajectory import VersionSpan
from agent_r1_proto.weights import WeightManifest

# Hermes dialogue: tools in the system message, results in a user message, several of one turn in
# the same one.
HERMES_TEMPLATE = """\
{%- set start = '<|im_start|>' -%}
{%- set stop = '<|im_end|>\n' -%}
{%- if tools or messages[0].role == 'system' -%}
  {{- start + 'system\n' -}}
  {%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif -%}
  {%- if tools -%}
    {{- '\n<tools>' -}}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor -%}
    {{- '\n</tools>' -}}
  {%- endif -%}
  {{- stop -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{ start + 'user' }}{% endif -%}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ stop }}{% endif -%}
  {%- elif message.role != 'system' -%}
    {{- start + message.role + '\n' + message.content + stop -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ start + 'assistant\n' }}{% endif -%}
"""
# The same, but it drops the thinking of earlier turns unless told to keep it.
FORGETFUL_TEMPLATE = HERMES_TEMPLATE.replace(
    "{{- start + message.role + '\n' + message.content + stop -}}",
    "{%- set said = message.content -%}"
    "{%- if '</think>' in said and not keep_thinking and not loop.last -%}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- endif -%}"
    "{{- start + message.role + '\\n' + said + stop -}}",
)

MERGES = ["t h", "th e", "Ġ the", "e r", "i n", "Ġ a", "Ġ t", "Ġ w", "a n", "Ċ Ċ", ". Ċ", "> Ċ"]
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def build_tokenizer(
    *, template: str = HERMES_TEMPLATE, markup_tokens: Sequence[str] = MARKUP_TOKENS
) -> Any:
    """Return a byte-level BPE tokenizer of ~290 tokens, as Qwen2.5's is, with a chat template.

    Args:
        template: its chat template.
        markup_tokens: tags that are one token each; others are spelled in bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    words = [*alphabet, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    # transformers names its own re-export of this class in its types.
    special: Any = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    markup: Any = [AddedToken(text, normalized=False) for text in markup_tokens]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens(markup)
    tokenizer.chat_template = template
    return tokenizer


def call_text(name: str = "search", **arguments: Any) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


Script = Callable[[list[int], int], list[int] | Awaitable[list[int]]]


@dataclass
class Sampled:
    """One request a `FakePolicy` got."""

    token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    request_id: str


class FakePolicy:
    """A sampler that answers from a script, by token ids. Implements `Policy`.

    A turn longer than `max_tokens` is cut and ends with "length", as an engine does. Token i of a
    turn has log-probability -(i + 1) / 100, and the version in use when it was sampled.

    Args:
        script: the turns in order, the last one repeated; or a function of the prompt and the
            number of the turn that returns a turn or a coroutine of one.
        eos_token_ids: tokens that end a turn.
    """

    def __init__(
        self,
        script: Sequence[Sequence[int]] | Script,
        *,
        eos_token_ids: Sequence[int],
        max_context: int = 4096,
        policy_version: int = 0,
    ) -> None:
        self._script = script
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_context = max_context
        self.policy_version = policy_version
        self.work = EngineWork()
        self._in_flight = 0
        self._death: str | None = None
        self.requests: list[Sampled] = []
        self.loaded: list[int] = []
        self.refuse_weights: str | None = None
        """Set to refuse every load with this text."""
        self.answering = asyncio.Event()
        """Cleared: probes are not answered, as by a wedged engine."""
        self.answering.set()
        self.is_loading = False
        self.num_probes = 0
        self.streams: list[str] = []
        """Ids of the requests whose tokens are being sent."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        return self._eos_token_ids

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def num_in_flight(self) -> int:
        return self._in_flight

    @property
    def death(self) -> str | None:
        return self._death

    def die(self, reason: str = "the engine was killed") -> None:
        """Fail every later call, as a crashed engine does."""
        self._death = reason

    async def start(self) -> None:
        return

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        request_id: str,
    ) -> Generation:
        self._check_alive()
        if not token_ids or len(token_ids) >= self._max_context:
            raise PromptTooLongError(f"prompt of {len(token_ids)} tokens")
        self.requests.append(Sampled(list(token_ids), max_tokens, temperature, seed, request_id))
        number = int(request_id.rsplit("/", 1)[1])
        self._in_flight += 1
        version = self.policy_version
        try:
            if callable(self._script):
                scripted = self._script(list(token_ids), number)
                turn = scripted if isinstance(scripted, list) else await scripted
            else:
                turn = list(self._script[min(number, len(self._script) - 1)])
                await asyncio.sleep(0)
        finally:
            self._in_flight -= 1
        self._check_alive()
        room = min(max_tokens, self._max_context - len(token_ids))
        sampled = turn[:room]
        ended = bool(sampled) and sampled[-1] in self._eos_token_ids
        return Generation(
            token_ids=sampled,
            logprobs=[-(i + 1) / 100 for i in range(len(sampled))],
            version_spans=self._spans(version, len(sampled)),
            finish_reason="stop" if ended else "length",
        )

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart]:
        """Yield the first turn token by token."""
        self._check_alive()
        if len(request.token_ids) >= self._max_context:
            raise PromptTooLongError(f"prompt of {len(request.token_ids)} tokens")
        if request.request_id in self.streams:
            raise ValueError(f"request_id ({request.request_id}) is in flight already")
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart]:
        self.streams.append(request.request_id)
        try:
            whole = await self.generate(
                request.token_ids,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                request_id=f"{request.request_id}/0",
            )
            for i, token in enumerate(whole.token_ids):
                await self.answering.wait()
                last = i + 1 == len(whole.token_ids)
                yield GeneratedPart(
                    token_ids=[token],
                    logprobs=[whole.logprobs[i]],
                    version_spans=[VersionSpan(policy_version=0, start=i, end=i + 1)],
                    finish_reason=whole.finish_reason if last else None,
                )
        finally:
            self.streams.remove(request.request_id)

    def _spans(self, version: int, num_tokens: int) -> list[VersionSpan]:
        """Weights loaded while a turn was sampled: the first half is of the version before."""
        middle = num_tokens // 2
        if version == self.policy_version or middle == 0:
            return [VersionSpan(policy_version=version, start=0, end=num_tokens)]
        return [
            VersionSpan(policy_version=version, start=0, end=middle),
            VersionSpan(policy_version=self.policy_version, start=middle, end=num_tokens),
        ]

    async def load_weights(self, manifest: WeightManifest) -> LoadTiming:
        self._check_alive()
        if self.refuse_weights is not None:
            raise WeightsRefusedError(self.refuse_weights)
        self.policy_version = manifest.policy_version
        self.loaded.append(manifest.policy_version)
        return LoadTiming(fetch_s=0.25, pause_s=0.125)

    async def score(self, token_ids: list[int], first: int = 1) -> list[float]:
        self._check_alive()
        return [-float(token) for token in token_ids[first:]]

    async def probe(self) -> None:
        self._check_alive()
        self.num_probes += 1
        await self.answering.wait()

    def kill(self, reason: str) -> None:
        self.die(reason)

    async def stop(self) -> None:
        self._death = "stopped"

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)


def _echo(call: ToolCall) -> ToolResult:
    return ToolResult(parts=[TextPart(text=f"result of {json.dumps(call.arguments)}")])


SEARCH_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
    "additionalProperties": False,
}


def asking_for(token: RunToken | None) -> Any:
    """Return an aiohttp middleware that lets in whoever has the token; everybody without one."""

    @web.middleware
    async def ask(request: web.Request, handler: Any) -> web.StreamResponse:
        sent = request.headers.get("authorization", "")
        if token is None or token.admits(sent):
            return await handler(request)
        return web.json_response({"detail": "this service asks for another token"}, status=401)

    return ask


@dataclass
class FakeToolServer:
    """A tool service over real HTTP whose answers and failures a test chooses.

    Use as `async with FakeToolServer() as server: ... server.url`.
    """

    name: str = "search"
    answer: Callable[[ToolCall], ToolResult | Awaitable[ToolResult]] = _echo
    sessions: bool = False
    max_batch: int = 64
    parameters: Mapping[str, Any] = field(default_factory=lambda: SEARCH_PARAMETERS)
    version: str = "7"
    instance: str = "fake-1"
    description: str = "Looks things up."
    idempotent: bool = True
    forks: bool = False
    outside_effects: bool = False
    statuses: list[int] = field(default_factory=list)
    """Status codes of the next requests to /call, /open, /fork and /close; 200 once it is empty."""
    spec_statuses: list[int] = field(default_factory=list)
    """Status codes of the next requests to /spec."""
    always: int = 200
    """Status code of every request once `statuses` is empty."""
    reply: bytes | None = None
    """Body of every /call in place of a real reply."""
    token: RunToken | None = None
    """What every request must have."""
    requests: list[CallRequest] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    forked: list[tuple[str, str]] = field(default_factory=list)
    """Sessions that were copied, and their copies."""
    url: str = ""
    _runner: web.AppRunner | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """Every call that came, in order."""
        return [call for request in self.requests for call in request.calls]

    @property
    def spec(self) -> ToolSpec:
        """What `GET /spec` answers."""
        return ToolSpec(
            name=self.name,
            version=self.version,
            description=self.description,
            parameters=dict(self.parameters),
            sessions=self.sessions,
            max_batch=self.max_batch,
            idempotent=self.idempotent,
            forks=self.forks,
            outside_effects=self.outside_effects,
        )

    async def __aenter__(self) -> FakeToolServer:
        app = web.Application(middlewares=[asking_for(self.token)])
        app.router.add_get("/spec", self._spec)
        app.router.add_post("/call", self._call)
        app.router.add_post("/open", self._open)
        app.router.add_post("/fork", self._fork)
        app.router.add_post("/close", self._close)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _failure(self) -> web.Response | None:
        status = self.statuses.pop(0) if self.statuses else self.always
        return None if status == 200 else web.Response(status=status, text="out of order")

    async def _spec(self, _: web.Request) -> web.Response:
        if self.spec_statuses:
            return web.Response(status=self.spec_statuses.pop(0))
        return web.Response(body=self.spec.model_dump_json(), content_type="application/json")

    async def _call(self, request: web.Request) -> web.Response:
        message = CallRequest.model_validate_json(await request.read())
        self.requests.append(message)
        failure = self._failure()
        if failure is not None:
            return failure
        if self.reply is not None:
            return web.Response(body=self.reply, content_type="application/json")
        results: list[ToolResult] = []
        for call in message.calls:
            result = self.answer(call)
            results.append(result if isinstance(result, ToolResult) else await result)
        reply = CallReply(version=self.version, instance=self.instance, results=results)
        return web.Response(body=reply.model_dump_json(), content_type="application/json")

    async def _open(self, request: web.Request) -> web.Response:
        self.opened.append((await request.json())["rollout_id"])
        return self._failure() or web.json_response({})

    async def _fork(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.forked.append((body["rollout_id"], body["fork_id"]))
        return self._failure() or web.json_response({})

    async def _close(self, request: web.Request) -> web.Response:
        self.closed.append((await request.json())["rollout_id"])
        return self._failure() or web.json_response({})


@contextlib.asynccontextmanager
async def running(coroutine: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a coroutine beside the test and cancel it at the end."""
    task: asyncio.Task[Any] = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class LeavingClient:
    """Posts to an ASGI application over a connection that `leave` closes before the answer.

    Args:
        app: the application, with its lifespan running.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a request; returns once the application has done with it."""
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            """Lose it, as a closed connection does."""

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"tool")],
            "server": ("tool", 80),
            "client": ("client", 1),
        }
        await self._app(scope, receive, send)

"""OpenTelemetry traces: one for each sample, from the learner's request to the step it trains in.

`start_tracing` is called once by each process. Without `run.otlp_endpoint` it does nothing, nothing
of OpenTelemetry is imported, and `span` costs nothing. A trace goes on in another service where its
`traceparent` (W3C Trace Context) travels: in `RolloutTask` and in HTTP headers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from agent_r1.runtime.config import RunConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

HEADER = "traceparent"
TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
"""Longest one request to the collector may take: a service must not wait for it when it ends."""
_NS = 1_000_000_000

OPERATIONS = {"rollout": "invoke_agent", "generate": "chat", "tool call": "execute_tool"}
"""Spans that OpenTelemetry's conventions for generative AI know, and their operations there."""
CONVENTIONS = {
    "temperature": "gen_ai.request.temperature",
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "tool": "gen_ai.tool.name",
    "rollout_id": "gen_ai.conversation.id",
}
"""Names of attributes in those conventions (release 1.37, in development). They stand beside those
of this project, in the spans of OPERATIONS."""
_OPERATION = "gen_ai.operation.name"

Note = Callable[..., None]
"""Adds attributes to a span that goes on."""

_tracer: Tracer | None = None  # a process has one, as it has one log


def start_tracing(run: RunConfig, service: str) -> TracerProvider | None:
    """Send the spans of this process to `run.otlp_endpoint`; None where that is not set.

    Args:
        run: names the collector.
        service: rollout, reward, learner, or the name of a tool.

    Returns:
        What must be shut down at the end, so that the last spans are sent; an exit handler does it.

    Raises:
        ValueError: OpenTelemetry is not installed.
    """
    if run.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ValueError(
            f"run.otlp_endpoint ({run.otlp_endpoint}) needs OpenTelemetry, and {exc.name} is not "
            "installed; `pip install 'agent-r1[otel]'`, or remove run.otlp_endpoint"
        ) from exc
    resource = Resource.create(
        {
            "service.namespace": "agent-r1",
            "service.name": service,
            "service.version": importlib.metadata.version("agent-r1"),
            "agent_r1.run_id": run.id,
        }
    )
    provider = TracerProvider(resource=resource)
    endpoint = run.otlp_endpoint.rstrip("/") + TRACES_PATH
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    global _tracer
    _tracer = provider.get_tracer("agent_r1")
    return provider


@contextlib.contextmanager
def span(name: str, parent: str | None = None, **attributes: AttributeValue) -> Generator[Note]:
    """Make a span of what happens inside; spans made meanwhile are below it.

    What is yielded adds attributes that are known later.

    Args:
        name: what happens.
        parent: traceparent of the span above; None is the one that this code runs in, if any.
        attributes: further facts; those of this project's own begin with `agent_r1.` on the wire.
    """
    if _tracer is None:
        yield _note_nothing
        return
    named = _named(name, attributes)
    with _tracer.start_as_current_span(name, _context(parent), attributes=named) as made:

        def note(**later: AttributeValue) -> None:
            made.set_attributes(_named(name, later))

        yield note


def _note_nothing(**attributes: AttributeValue) -> None:
    """Add attributes where nothing is traced."""


def record_span(
    name: str, parent: str | None, started_s: float, ended_s: float, **attributes: AttributeValue
) -> None:
    """Make a span of something that is over, between two Unix times in seconds."""
    if _tracer is None or parent is None:
        return
    made = _tracer.start_span(
        name,
        _context(parent),
        start_time=int(started_s * _NS),
        attributes=_named(name, attributes),
    )
    made.end(int(ended_s * _NS))


def begin_trace(name: str, **attributes: AttributeValue) -> str | None:
    """Make the first span of a new trace; return its traceparent, None without tracing."""
    if _tracer is None:
        return None
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    made = _tracer.start_span(name, Context(), attributes=_named(name, attributes))
    made.end()
    return _inject(set_span_in_context(made)).get(HEADER)


def trace_headers() -> dict[str, str]:
    """Return the headers that let the span this code runs in go on elsewhere."""
    return {} if _tracer is None else _inject(None)


def traceparent_of(headers: Mapping[str, str]) -> str | None:
    """Return the span that a request comes from."""
    return headers.get(HEADER)


def _named(span: str, attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """Return attributes as they are sent: under names of this project, and of the conventions."""
    own: dict[str, AttributeValue] = {f"agent_r1.{name}": v for name, v in attributes.items()}
    if span not in OPERATIONS:
        return own
    known = {CONVENTIONS[name]: v for name, v in attributes.items() if name in CONVENTIONS}
    return own | {_OPERATION: OPERATIONS[span]} | known


def _context(parent: str | None) -> Context | None:
    if parent is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({HEADER: parent})


def _inject(context: Context | None) -> dict[str, str]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier

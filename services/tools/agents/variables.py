"""Variables that tell an agent's program of its task and its model: those that SDKs read."""

from __future__ import annotations

TELEMETRY_OFF = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "OTEL_SDK_DISABLED": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
}
FIND = ("sh", "-c", 'command -v "$0"')
"""Command that fails where the program that it is given is not there."""
_PROMPT_BYTES = 100_000
"""Longer prompts do not fit into an environment variable."""


def agent_variables(
    base_url: str, key: str, model: str, context: int, task_file: str, prompt: str
) -> dict[str, str]:
    """Return the variables of one attempt.

    Args:
        base_url: of OpenAI's API, up to and with `/v1`; Anthropic's SDKs add that themselves.
        key: of the session.
        model: what it is called there.
        context: tokens that it reads and samples together, at most.
        task_file: has the task as JSON.
        prompt: what is asked.
    """
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "AGENT_R1_CONTEXT": str(context),
        "AGENT_R1_TASK": task_file,
    }
    if len(prompt.encode()) <= _PROMPT_BYTES and "\0" not in prompt:
        variables["AGENT_R1_PROMPT"] = prompt
    return variables

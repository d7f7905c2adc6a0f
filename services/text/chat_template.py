"""The model's tokenizer and its chat template: loaded, and asked to render dialogues.

chat_format.py makes tokens of the renderings; call_format.py reads what they tell the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ChatTemplateError(ValueError):
    """The model's chat template or tokenizer cannot be used token by token."""


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a Hugging Face model directory.

    Raises:
        ChatTemplateError: there is none, it has no chat template or it is not a fast one.
    """
    from transformers import AutoTokenizer  # seconds to import; tests with fakes do without

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise ChatTemplateError(
            f"model.path ({model_path}) has no tokenizer that transformers can load: {exc}"
        ) from exc
    if not getattr(tokenizer, "is_fast", False):
        raise ChatTemplateError(
            f"the tokenizer of model.path ({model_path}) has no tokenizer.json; convert it to a "
            "fast tokenizer with transformers and save it beside the model"
        )
    if not tokenizer.chat_template:
        raise ChatTemplateError(
            f"the tokenizer of model.path ({model_path}) has no chat template; put a "
            "chat_template.jinja beside the model"
        )
    return tokenizer


def render(tokenizer: Any, dialogue: Sequence[Mapping[str, Any]], what: str, **options: Any) -> str:
    """Render a dialogue as text with the model's chat template.

    Raises:
        ChatTemplateError: the template cannot; `what` says what was to be rendered.
    """
    try:
        return tokenizer.apply_chat_template(dialogue, tokenize=False, **options)
    except Exception as exc:  # a template is code: a wrong key or index raises what Python does
        raise ChatTemplateError(f"the chat template cannot render {what}: {exc}") from exc

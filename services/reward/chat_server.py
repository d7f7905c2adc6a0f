"""A language model behind OpenAI's chat API, as reward components ask it."""

from __future__ import annotations

from typing import Any

from agent_r1.reward.model_server import ModelServer
from agent_r1_proto.tasks import ChatMessage


class ChatServer(ModelServer):
    """Asks one model to complete a dialogue."""

    async def complete(self, messages: list[ChatMessage], **options: Any) -> dict[str, Any]:
        """Return the first choice that the model gives.

        Args:
            messages: the dialogue.
            options: more keys of the request's body.

        Raises:
            ServerAwayError: the server did not answer in time.
            ValueError: it refuses the request, or its answer is no chat completion.
        """
        asked = [message.model_dump() for message in messages]
        return await self.post(
            "/chat/completions",
            {"messages": asked, "temperature": 0.0, **options},
            lambda answer: dict(answer["choices"][0]),
            f"no chat completion; correct {self.table}.url, which usually ends with /v1",
        )

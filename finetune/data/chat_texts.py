"""Chats as a tokenizer's template writes them, in the process that limits templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.data.template_sandbox import ChatTemplate, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    prompt: bool = True,
) -> str:
    """Return the text of a chat.

    Args:
        prompt: add the generation prompt.

    Raises:
        ValueError: the tokenizer has no template, the template refuses the chat, or it exceeds a limit.
    """
    template = ChatTemplate(tokenizer.get_chat_template(tools=tools), tokenizer.special_tokens_map)
    (found,) = render(template, [(messages, tools)], prompt=prompt)
    if found.error:
        raise ValueError(found.error)
    return found.text

"""Select the tokens of an example that contribute to the loss. All other tokens have the label -100."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.data.examples import BadRow
from finetune.data.template_sandbox import joined

if TYPE_CHECKING:
    from collections.abc import Collection

    from finetune.data.examples import Example
    from finetune.data.template_sandbox import Rendered

IGNORED = -100  # the label that PyTorch's cross-entropy skips


def labels(ids: list[int], trained: list[tuple[int, int]]) -> list[int]:
    """Return the ids in the ranges [start, end) of `trained`, and -100 elsewhere."""
    found = [IGNORED] * len(ids)
    for start, end in trained:
        found[start:end] = ids[start:end]
    return found


def trained_spans(example: Example, text: Rendered, train_on: str, eos: str) -> list[list[int]]:
    """Return the character ranges [start, end) of the assistant's turns that contribute to the loss.

    Raises:
        BadRow: the chat template does not mark the turns separately, but only some of them are trained on.
    """
    spans, roles = text.spans, [message["role"] for message in example.messages or ()]
    if len(spans) != len(example.trained):
        # some templates mark another turn after the last one
        spans = [[start, end] for start, end in spans if text.text[start:end].strip() != eos]
    if len(spans) != len(example.trained):
        spans = joined(spans)
    if len(spans) != len(example.trained):
        if train_on == "assistant" and all(example.trained):
            return spans
        what = "the chat template does not mark the assistant's turns one by one"
        raise BadRow("malformed", what, example.where, fix="train_on: assistant, or another chat_template")
    first = 0
    if train_on == "last_turn":
        first = len(spans) - 1
    elif train_on == "completion":
        after = roles[len(roles) - roles[::-1].index("user") :] if "user" in roles else roles
        first = len(spans) - after.count("assistant")
    return [span for i, span in enumerate(spans) if i >= first and example.trained[i]]


def token_range(
    text: str, span: tuple[int, int], encoding: Any, ids: list[int], prompt_end: str, stops: Collection[int]
) -> tuple[int, int, bool]:
    """Return the tokens [low, high) of `span`, and whether one of them crosses a border of the span.

    Args:
        encoding: the encoding of `text` from the tokenizers library.
        ids: the encoding's token ids.
        prompt_end: the text that the chat template writes before an answer. It is not trained on.
        stops: ids that end a turn. The text after a stop id is not trained on.
    """
    start, end = span
    for back in range(min(len(prompt_end), start), -1, -1):
        if text.startswith(prompt_end, start - back):  # a marked range can start inside the end of the prompt
            start += len(prompt_end) - back
            break
    first = next((t for c in range(start, end) if (t := encoding.char_to_token(c)) is not None), None)
    if first is None:
        return 0, 0, False
    last = next(t for c in range(end - 1, -1, -1) if (t := encoding.char_to_token(c)) is not None)
    high, count = last + 1, len(encoding)
    while high < count and (at := encoding.token_to_chars(high)) and at[0] < end:
        high += 1  # one character can be several tokens
    stop = next((i for i in range(high - 1, first - 1, -1) if ids[i] in stops), None)
    if stop is not None and not text[encoding.token_to_chars(stop)[1] : end].strip():
        high = stop + 1  # exclude the text that the template writes after the end of a turn
    merged = encoding.token_to_chars(first)[0] < start
    merged |= ids[high - 1] not in stops and encoding.token_to_chars(high - 1)[1] > end
    return first, high, merged

"""Select the tokens of an example that contribute to the loss. All other tokens have the label -100."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.examples import BadRow, short
from finetune.data.template_sandbox import joined

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from tokenizers import Encoding

    from finetune.data.examples import Example, TurnWeights
    from finetune.data.template_sandbox import Rendered

IGNORED = -100  # the label that PyTorch's cross-entropy skips
WEIGHTS = "loss_weights"
"""Column of the prepared data: the weight of each label. Data without weights between 0 and 1 lacks it."""


def labels(ids: list[int], trained: list[tuple[int, int]]) -> list[int]:
    """Return the ids in the ranges [start, end) of `trained`, and -100 elsewhere."""
    found = [IGNORED] * len(ids)
    for start, end in trained:
        found[start:end] = ids[start:end]
    return found


def trained_spans(example: Example, text: Rendered, train_on: str, eos: str) -> list[tuple[int, list[int]]]:
    """Return the assistant's turns that contribute to the loss: number and character range [start, end).

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
        if train_on == "assistant" and all(example.trained) and not example.weights:
            return list(enumerate(spans))
        raise BadRow(
            "malformed",
            "the chat template does not mark the assistant's turns one by one",
            example.where,
            fix="train_on: assistant, or another chat_template",
        )
    first = 0
    if train_on == "last_turn":
        first = len(spans) - 1
    elif train_on == "completion":
        after = roles[len(roles) - roles[::-1].index("user") :] if "user" in roles else roles
        first = len(spans) - after.count("assistant")
    return [(i, span) for i, span in enumerate(spans) if i >= first and example.trained[i]]


def token_range(
    text: str,
    span: tuple[int, int],
    encoding: Any,
    ids: list[int],
    prompt_end: str,
    stops: Collection[int],
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
    first, high = _first_covering(start, encoding), _first_from(end, encoding)
    if start >= end or first >= high:
        return 0, 0, False
    stop = next((i for i in range(high - 1, first - 1, -1) if ids[i] in stops), None)
    if stop is not None and not text[encoding.token_to_chars(stop)[1] : end].strip():
        high = stop + 1  # exclude the text that the template writes after the end of a turn
    merged = encoding.token_to_chars(first)[0] < start
    merged |= ids[high - 1] not in stops and encoding.token_to_chars(high - 1)[1] > end
    return first, high, merged


def _first_covering(place: int, encoding: Any) -> int:
    """Return the first token that covers the character at `place` or a later one.

    `encoding.char_to_token` looks at all tokens before, which takes quadratic time for a chat of many turns.
    """
    count = len(encoding)
    token = bisect_right(range(count), place, key=lambda token: encoding.token_to_chars(token)[1])
    # A tokenizer can exclude whitespace from the range of a token, which then covers no character
    while token < count and (chars := encoding.token_to_chars(token)) and chars[0] == chars[1]:
        token += 1
    return token


def _first_from(place: int, encoding: Any) -> int:
    """Return the first token that starts at the character at `place` or later."""
    return bisect_left(range(len(encoding)), place, key=lambda token: encoding.token_to_chars(token)[0])


class Weighted(NamedTuple):
    """The tokens of one turn by their weight."""

    trained: list[tuple[int, int]]
    """Ranges [start, end) of tokens with a weight above 0."""
    fractions: list[tuple[int, int, float]]
    """Ranges [start, end) of tokens with one weight between 0 and 1."""
    is_divided: bool
    """Whether a token has characters of two weights. Its first character, without a space, decides."""


def by_weight(
    text: str, encoding: Encoding, tokens: tuple[int, int], content_start: int, weights: TurnWeights
) -> Weighted:
    """Return the weights of the tokens [low, high) of a turn.

    Args:
        encoding: the encoding of `text` from the tokenizers library.
        content_start: position of the message's content in `text`. It can be before the turn if the chat
            template strips the content.
    """
    spans = [(content_start + start, content_start + end, weight) for start, end, weight in weights.spans]
    found, is_divided = list[float](), False
    for token in range(*tokens):
        start, end = encoding.token_to_chars(token) or (0, 0)
        visible = [place for place in range(start, end) if not text[place].isspace()] or [start]
        of_characters = [_weight_at(place, spans, weights.message) for place in visible]
        is_divided |= len(set(of_characters)) > 1
        found.append(of_characters[0])
    trained = [(start, end) for start, end, is_trained in _runs(map(bool, found), tokens[0]) if is_trained]
    fractions = [(start, end, weight) for start, end, weight in _runs(found, tokens[0]) if 0 < weight < 1]
    return Weighted(trained, fractions, is_divided)


def _runs(values: Iterable[float], start: int) -> Iterator[tuple[int, int, float]]:
    """Yield the ranges [start, end) of equal values, and their value."""
    for value, run in groupby(values):
        end = start + len(list(run))
        yield start, end, value
        start = end


def _weight_at(place: int, spans: list[tuple[int, int, float]], otherwise: float) -> float:
    index = bisect_right(spans, place, key=lambda span: span[0]) - 1
    return spans[index][2] if index >= 0 and place < spans[index][1] else otherwise


def content_start(text: str, span: tuple[int, int], first: int, content: str, where: str) -> int:
    """Return the position of a message's content in the rendered chat.

    Args:
        span: character range of the turn.
        first: position of the first token of the turn.

    Raises:
        BadRow: the chat template changes the content, or the turn holds it twice.
    """
    for said in (content, content.strip()):
        lead = content.index(said)
        for start in (span[0], first):
            if text.startswith(said, start):
                return start - lead
        place = text.find(said, *span)
        if place >= 0 and text.find(said, place + 1, span[1]) < 0:
            return place - lead
    raise BadRow(
        "malformed",
        "weights of parts need a chat template that writes the content once, unchanged",
        where,
        found=short(content),
        fix="write one weight for the whole message",
        code="chat-template",
    )

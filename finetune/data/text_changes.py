"""Find texts whose letters or digits a tokenizer changes or drops before it looks for tokens.

Usual tokenizers only compose characters, change their case, or write spaces in another way. Others can
replace a word by another one. Tests of the tokenizer alone can't find this, so each text is compared.
"""

from __future__ import annotations

import json
import os
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

# Steps that keep letters and digits, up to their case, their accents and their form (NFKD)
_KEEPS = frozenset({
    "Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "BertNormalizer",
    "ByteLevel", "Metaspace", "Digits", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts",
})  # fmt: skip
_SPACES = frozenset({r"\s+", r"\s", r" {2,}", r" +", r"\n", r"[\r\n]", r"[\r\n]+"})  # patterns of spaces
AROUND = 12  # characters that a message shows before and after a change


def may_change(backend: Tokenizer) -> bool:
    """Return whether a step of a tokenizer can change or drop letters or digits of some text."""
    parts = (state(backend.normalizer), state(backend.pre_tokenizer))
    return any(part is None or any(map(_is_doubtful, steps(part))) for part in parts)


def decodes_other_words(backend: Tokenizer) -> bool:
    """Return whether the decoder replaces or strips letters or digits, so that answers read differently."""
    return any(
        (step["type"] == "Replace" and _is_doubtful(step))
        or (step["type"] == "Strip" and step["content"].isalnum())
        for step in steps(state(backend.decoder))
    )


def find(backend: Tokenizer, text: str) -> str:
    """Return the first change of letters or digits in a text, or the empty string."""
    normalizer, pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    changed = normalizer.normalize_str(text) if normalizer else text
    in_bytes = any(step["type"] == "ByteLevel" for step in steps(state(normalizer)))
    if found := _difference(_letters(text, in_bytes), _letters(changed, in_bytes)):
        return found
    if pre_tokenizer is None:
        return ""
    kept = [offsets for _, offsets in pre_tokenizer.pre_tokenize_str(changed)]
    gaps = pairwise([(0, 0), *kept, (len(changed), len(changed))])
    dropped = (changed[end:start] for (_, end), (start, _) in gaps)
    return next((f"{_short(gap)} is dropped" for gap in dropped if any(map(str.isalnum, gap))), "")


def _is_doubtful(step: dict[str, Any]) -> bool:
    kind, behavior = step["type"], step.get("behavior")
    pattern = step.get("pattern")
    of_spaces = isinstance(pattern, dict) and (
        pattern.get("Regex") in _SPACES or not any(map(str.isalnum, pattern.get("String", "a")))
    )
    if kind == "Replace":
        return not of_spaces or any(map(str.isalnum, step.get("content", "")))
    if kind == "Prepend":
        return any(map(str.isalnum, step.get("prepend", "")))
    if kind == "CharDelimiterSplit":
        return str(step.get("delimiter", "a")).isalnum()
    if kind in ("Split", "Punctuation"):
        return behavior == "Removed" and not (of_spaces and not step.get("invert"))
    return kind not in _KEEPS


def _letters(text: str, in_bytes: bool) -> str:
    """Return the letters and digits of a text without case, accents and forms; of bytes, only ASCII."""
    if text.isascii():
        return "".join(filter(str.isalnum, text.casefold()))
    if in_bytes:
        return "".join(one for one in text if one.isascii() and one.isalnum()).casefold()
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(filter(str.isalnum, plain))


def _difference(text: str, changed: str) -> str:
    if text == changed:
        return ""
    start = len(os.path.commonprefix([text, changed]))  # noqa: RUF071 (of texts, not of paths)
    first = max(0, start - AROUND)
    return f"{_short(text[first:])} becomes {_short(changed[first:])}"


def _short(text: str) -> str:
    return repr(text[: 2 * AROUND] + ("..." if len(text) > 2 * AROUND else ""))


def state(part: Any) -> Any:
    """Return a part of a tokenizer as JSON, `{}` if there is none, or `None` if it is Python code."""
    if part is None:
        return {}
    try:
        return json.loads(part.__getstate__())
    except Exception:  # the library raises this type for a part that it can't serialize
        return None


def steps(state: Any) -> Iterator[dict[str, Any]]:
    """Yield each object with a type in nested JSON."""
    if isinstance(state, dict) and "type" in state:
        yield state
    for part in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from steps(part)

"""Find texts whose words a tokenizer changes or drops before it looks for tokens.

Usual tokenizers only compose characters, change their case, or write spaces and quotes in another way. Others
can replace a word by another one. Tests of the tokenizer alone can't find this, so each text is compared.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

# Steps that keep words, up to the case, accents and form (NFKD) of their characters
_KEEPS = frozenset({
    "Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "BertNormalizer",
    "ByteLevel", "Metaspace", "Digits", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts",
})  # fmt: skip
_MARK = "\u2581"  # what many tokenizers write for a space
_MARKS = (_MARK, "\u0120", "\u010a")  # of spaces and line breaks in tokens
_SPACES = frozenset({r"\s+", r"\s", r" {2,}", r" +", r"\n", r"[\r\n]", r"[\r\n]+"})  # patterns of spaces
_QUOTES = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"'),
    }
)
_INVISIBLE = ("Cc", "Cf", "Cn", "Co")  # categories of control characters, such as a space without width
AROUND = 12  # characters that a message shows before and after a change


class Comparison(NamedTuple):
    """How the texts of a tokenizer are compared with what its steps make of them."""

    kinds: frozenset[str]
    """The kinds of the normalizer's steps."""
    drops: bool
    """Whether the pre-tokenizer can drop a part of a text."""


def comparison(backend: Tokenizer) -> Comparison | None:
    """Return how to compare each text, or `None` if no step of the tokenizer can change or drop words."""
    doubtful = []
    for part in (state(backend.normalizer), state(backend.pre_tokenizer)):
        doubtful.append(part is None or any(map(_is_doubtful, steps(part))))
    if not any(doubtful):
        return None
    return Comparison(frozenset(step["type"] for step in steps(state(backend.normalizer))), doubtful[1])


def writes_other_words(backend: Tokenizer) -> bool:
    """Return whether a step writes letters for spaces, or the decoder changes or drops words."""
    before = [*steps(state(backend.normalizer)), *steps(state(backend.pre_tokenizer))]
    decoder = list(steps(state(backend.decoder)))
    marks = [step.get(key) for step in (*before, *decoder) for key in ("replacement", "suffix", "prepend")]
    stripped = [step["content"] for step in decoder if step["type"] == "Strip"]
    changes = any(
        step["type"] == "CTC" or (step["type"] == "Replace" and _of_words(step)) for step in decoder
    )
    return changes or any(str(mark).isalnum() for mark in (*marks, *stripped) if mark)


def _of_words(step: dict[str, Any]) -> bool:
    """Return whether a replacement of a decoder writes or reads words, and not only marks of tokenizers."""
    pattern = step["pattern"]
    text = pattern.get("String", "")
    plain = re.sub(r"\\p\{\w+\}|\\.", "", pattern.get("Regex", ""))  # without classes of characters
    reads = (text.isalnum() and text not in _MARKS) or re.search(r"[^\W\d_]{2,}", plain)
    return bool(reads) or any(map(str.isalnum, step["content"]))


def find(backend: Tokenizer, text: str, how: Comparison) -> str:
    """Return the first change of words in a text, for a message; the empty string if there is none."""
    changed = backend.normalizer.normalize_str(text) if backend.normalizer else text
    words, others = _words(text), _words(_decoded(changed) if "ByteLevel" in how.kinds else changed)
    # BERT writes spaces around Chinese characters, and other normalizers for invisible characters
    hidden = not text.isascii() and any(unicodedata.category(one) in _INVISIBLE for one in text)
    if hidden or "BertNormalizer" in how.kinds:
        words, others = ["".join(words)], ["".join(others)]
    if (found := _difference(words, others)) or not how.drops:
        return found
    kept = [offsets for _, offsets in backend.pre_tokenizer.pre_tokenize_str(changed)]
    gaps = pairwise([(0, 0), *kept, (len(changed), len(changed))])
    dropped = (changed[end:start] for (_, end), (start, _) in gaps)
    return next((f"{_short(gap)} is dropped" for gap in dropped if _words(gap)), "")


def _is_doubtful(step: dict[str, Any]) -> bool:
    """Return whether a step can change or drop something else than spaces and quotes."""
    kind, behavior = step["type"], step.get("behavior")
    pattern: Any = step.get("pattern")
    pattern = pattern if isinstance(pattern, dict) else {}
    of_spaces = pattern.get("Regex") in _SPACES or ("String" in pattern and not _words(pattern["String"]))
    if kind == "Replace":
        quotes = {"``": '"', "''": '"'}.get(pattern.get("String", "")) == step.get("content")
        return not quotes and not (of_spaces and step.get("content") and not _words(step["content"]))
    if kind == "Prepend":
        return bool(_words(step.get("prepend", "")))
    if kind == "CharDelimiterSplit":
        return bool(_words(str(step.get("delimiter", "a"))))
    if kind in ("Split", "Punctuation"):
        return behavior == "Removed" and not (of_spaces and not step.get("invert"))
    return kind not in _KEEPS


def _words(text: str) -> list[str]:
    """Return the words of a text without case, accents and forms."""
    text = text.replace(_MARK, " ")
    if text.isascii():
        return text.replace("``", '"').replace("''", '"').replace("`", "'").casefold().split()
    # Marks are removed first, because the time of `normalize` is quadratic in the length of a row of marks
    plain = _without_marks(unicodedata.normalize("NFKD", _without_marks(text)))
    plain = _without_marks(unicodedata.normalize("NFKD", plain.casefold()))
    return plain.translate(_QUOTES).replace("''", '"').split()


def _without_marks(text: str) -> str:
    """Return a text without accents and invisible characters."""
    categories = map(unicodedata.category, text)
    pairs = zip(text, categories, strict=True)
    return "".join(one for one, kind in pairs if one.isspace() or (kind[0] != "M" and kind not in _INVISIBLE))


def _decoded(text: str) -> str:
    """Return the text for which a normalizer of bytes has written these characters."""
    from tokenizers.decoders import ByteLevel

    return ByteLevel().decode(list(text))


def _difference(words: list[str], changed: list[str]) -> str:
    if words == changed:
        return ""
    one, other = " ".join(words), " ".join(changed)
    start = len(os.path.commonprefix([one, other]))  # noqa: RUF071 (of texts, not of paths)
    first = max(0, start - AROUND)
    return f"{_short(one[first:])} becomes {_short(other[first:])}"


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

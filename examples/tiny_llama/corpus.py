"""Seeded generator of the pre-training corpus, and the check of its one invariant.

    python -m examples.tiny_llama.corpus --documents 5      # print a few
    python -m examples.tiny_llama.corpus --check 100000     # check the invariant on a sample

Invariant: pre-training never shows the task. A JSON document stands alone, no chat holds JSON, no
JSON value is a sentence, and no JSON object names a type of the task. So no document holds both a
sentence and a JSON record made from it (`violation`).
"""

import argparse
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

from . import chats, json_docs, prose

RECORD_TYPES = {"order", "appointment", "invoice"}
SENTENCE = re.compile(r"\b[A-Za-z'-]+(?:[ ,]+[A-Za-z'-]+){4,}")  # five words in a row
MIX = {
    chats.chat_document: 30,
    json_docs.json_document: 14,
    json_docs.json_lines: 4,
    prose.chronicle: 6,
    prose.notes: 10,
    prose.story: 4,
    prose.town: 2,
    prose.shop: 3,
    prose.dialogue: 2,
    prose.shopping_list: 3,
    prose.card: 3,
    prose.arithmetic: 2,
    prose.calendar: 4,
    prose.diary: 2,
    prose.counting: 2,
    prose.amounts: 2,
    prose.lookup: 6,
    prose.letter: 2,
}


def documents(seed: str) -> Iterator[str]:
    """An endless stream of documents that depends on `seed` alone."""
    rng = Random(seed)
    makers, weights = list(MIX), list(MIX.values())
    while True:
        yield rng.choices(makers, weights)[0](rng)


def json_values(text: str) -> Iterator[tuple[Any, int, int]]:
    """Every JSON object or array of objects in a text, with its place."""
    decoder, start = json.JSONDecoder(), 0
    while (match := re.compile(r"[\[{]").search(text, start)) is not None:
        start = match.start() + 1
        try:
            value, end = decoder.raw_decode(text, match.start())
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) or (isinstance(value, list) and value != []):
            yield value, match.start(), end
            start = end


def strings_and_keys(value: Any) -> Iterator[tuple[str, bool]]:
    """Every string of a JSON value, and whether it is a key."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield key, True
            yield from strings_and_keys(child)
    elif isinstance(value, list):
        for child in value:
            yield from strings_and_keys(child)
    elif isinstance(value, str):
        yield value, False


def violation(document: str) -> str | None:
    """Why a document breaks the invariant, or None."""
    rest, last, found = [], 0, False
    for value, start, end in json_values(document):
        if not any(is_key for _, is_key in strings_and_keys(value)):
            continue  # a list without objects, such as a check box
        found = True
        rest.append(document[last:start])
        last = end
        for text, is_key in strings_and_keys(value):
            if text in RECORD_TYPES:
                return f"a record type in JSON: {text}"
            if not is_key and SENTENCE.search(text):
                return f"a sentence in JSON: {text}"
    rest.append(document[last:])
    if found and (match := SENTENCE.search(" ".join(rest))):
        return f"a sentence beside JSON: {match.group()}"
    if found and "<|im_start|>" in document:
        return "JSON in a chat"
    return None


def check(num_documents: int, seed: str = "check") -> None:
    """Raise if a document of the sample breaks the invariant."""
    for index, document in zip(range(num_documents), documents(seed), strict=False):
        if reason := violation(document):
            raise ValueError(f"document {index} of seed {seed!r}: {reason}\n{document}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    for _, document in zip(range(args.documents), documents(args.seed), strict=False):
        print(f"{document}\n{'-' * 40}")
    check(args.check, args.seed)
    print(f"checked {args.check} documents: no sentence beside a JSON record")


if __name__ == "__main__":
    main()

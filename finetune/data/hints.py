"""Advice for errors about rows, files and roles that cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from finetune.core.visible_text import visible

ASKED = ("prompt", "instruction", "question", "query", "input", "problem", "user", "human")
ANSWERED = ("completion", "output", "answer", "response", "reply", "solution", "target", "assistant", "gpt")
ROLES = {  # role in lower case -> the most likely role in finetune
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "customer", "client", "person", "me", "question"), "user"),
    **dict.fromkeys(
        ("gpt", "bot", "ai", "model", "agent", "chatbot", "answer", "function_call"), "assistant"
    ),
    **dict.fromkeys(("observation", "function_response", "function", "ipython"), "tool"),
    **dict.fromkeys(("developer", "sys"), "system"),
}
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst", ".7z")
TABLES = (".tsv", ".xlsx", ".xls", ".ods")
NAME = re.compile(r"[A-Za-z_][\w-]*")


def role_map(names: Iterable[str]) -> str:
    """Return a suggested `role_map` for unknown roles, with dots for roles that cannot be guessed."""
    found = [f"{_quoted(name)}: {ROLES.get(name.lower(), '...')}" for name in names]
    return f"role_map: {{{', '.join(found)}}}"


def columns(names: Sequence[str], value: dict[str, Any], file: str) -> tuple[str, str]:
    """Return an additional explanation and a suggestion for columns that match no format."""
    if file.endswith(".csv") and any(map(_like_data, names)):
        fix = "add a first line with the names of the columns: prompt,completion"
        return "the first line looks like data, not like names of columns", fix
    by_name = {name.strip().lower(): name for name in names}
    if {"chosen", "rejected"} <= by_name.keys():
        chosen = by_name["chosen"]
        ours = "messages" if isinstance(value.get(chosen), list) else "completion"
        more = ", prompt: ..." if ours == "completion" and "prompt" not in value else ""
        fix = f"columns: {{{ours}: {_quoted(chosen)}{more}}} trains on the chosen answers only"
        return "the data holds preferences, and finetune has no preference tuning", fix
    lists = [name for name in names if isinstance(value.get(name), list) and any(map(_is_row, value[name]))]
    if lists:
        return "", f'write a file with only the list under "{lists[0]}"'
    question = next((by_name[name] for name in ASKED if name in by_name), next(iter(names), "question"))
    answered = next((by_name[name] for name in ANSWERED if by_name.get(name, question) != question), "")
    if len(names) == 1:
        fix = (
            f"add a column with answers, or train on all of the text: columns: {{text: {_quoted(question)}}}"
        )
        return "an example needs an answer", fix
    others = [name for name in names if name != question]
    answered = answered or (others[0] if len(others) == 1 else "")
    answer = _quoted(answered) if answered else "..."
    ours = ("prompt", "completion") if question.strip().lower() == "prompt" else ("instruction", "output")
    return "", f"columns: {{{ours[0]}: {_quoted(question)}, {ours[1]}: {answer}}}"


def separator(header: Sequence[str]) -> tuple[str, str, str] | None:
    """Return problem, expectation and suggestion if a CSV header uses another separator than the comma."""
    found = [mark for mark in SEPARATORS if len(header) == 1 and mark in header[0]]
    if not found:
        return None
    mark, name = found[0], SEPARATORS[found[0]]
    shown = "a tab" if mark == "\t" else f'"{mark}"'
    what = f"the file has one column, and its name contains {shown}"
    how = f"pandas.read_csv(..., sep={json.dumps(mark)}).to_csv(..., index=False)"
    return what, f"fields separated by commas, not {name}", f"save the file with commas: {how}"


def line(text: str) -> str:
    """Return a suggestion for a line that is not JSON, or an empty string."""
    text = text.strip()
    if "\0" in text:
        return "save the file as UTF-8 (it looks like UTF-16)"
    if "\r" in text:
        return r"end lines with \n or \r\n"
    if text.startswith("{'"):
        return "write each example with json.dumps (this line is a printed Python dict)"
    if text in ("{", "["):
        return "write one example per line, or write an array to a .json file"
    if text.endswith("},"):
        return "remove the comma at the end of each line, or write an array to a .json file"
    if re.match(r"[^\W\d]", text) and not re.match("true|false|null|NaN|Infinity", text):
        return 'write each example as {"text": ...}, or save the whole text as a .txt file'
    return ""


def value(found: object) -> str:
    """Return a suggestion for a line that is JSON but not an object, or an empty string."""
    if isinstance(found, str):
        return 'write the example as {"text": ...}'
    if isinstance(found, list) and found and isinstance(found[0], dict):
        turns = "role" in found[0] or "from" in found[0]
        return 'write the example as {"messages": [...]}' if turns else "write an array to a .json file"
    return ""


def file(suffix: str) -> str:
    """Return a suggestion for a file type that finetune cannot read, or an empty string."""
    if suffix.lower() in PACKED:
        return "unpack the file"
    return "save the file as .csv, with commas, or as .jsonl" if suffix.lower() in TABLES else ""


def of_columns(found: dict[str, Any]) -> bool:
    """Return whether the only object of a file holds columns or named rows, and is not a row itself."""
    parts = list(found.values())
    if parts and all(isinstance(part, dict) for part in parts):
        return True  # the default of pandas.DataFrame.to_json
    lists = [part for part in parts if isinstance(part, list) and not any(isinstance(p, dict) for p in part)]
    return bool(lists) and len(lists) == len(parts) and len({len(part) for part in lists}) == 1


def _like_data(name: str) -> bool:
    name = name.strip()
    return len(name.split()) > 2 or len(name) > 40 or name.endswith((".", "?", "!")) or name.isdigit()


def _is_row(found: object) -> bool:
    return isinstance(found, dict) and not {"role", "from"} & found.keys()


def _quoted(name: str) -> str:
    plain = NAME.fullmatch(name) and name.lower() not in ("true", "false", "null")
    return name if plain else visible(json.dumps(name, ensure_ascii=False))  # YAML has the same escapes

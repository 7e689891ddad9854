"""Small tasks for lm-eval: a file of each kind, with its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUESTIONS = [
    {"question": f"What is {a} plus {b}?", "options": [str(a + b), str(a + b + 1), "a stone"], "right": 0}
    for a in range(4)
    for b in range(3)
]
ANSWERS = [{"asked": f"Say {word}.", "said": f"I say {word}."} for word in ("one", "two", "three")]
CHOICE = 'kind: multiple_choice\nprompt: "{{ question }}"\nchoices: "{{ options }}"\nanswer: "{{ right }}"\n'
ASKED = 'prompt: "{{ asked }}"\nanswer: "{{ said }}"\nmax_new_tokens: 6\n'


def write_task(folder: Path, name: str, rows: list[Any], text: str) -> str:
    """A task file and its rows; returns the path of the file."""
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / f"{name}.yaml").write_text(f"data: {name}.jsonl\n{text}")
    return str(folder / f"{name}.yaml")


def one_of_each(folder: Path) -> list[str]:
    """Paths of one task of each kind: choice, exact, found, as_json, likely."""
    as_json = [{"asked": "JSON?", "said": {"a": [1, 2]}}]
    return [
        write_task(folder, "choice", QUESTIONS, CHOICE),
        write_task(folder, "exact", ANSWERS, f"kind: exact_match\nchat: true\n{ASKED}"),
        write_task(folder, "found", ANSWERS, f"kind: regex_match\npattern: 'say (\\w+)'\n{ASKED}"),
        write_task(folder, "as_json", as_json, f"kind: json_match\n{ASKED}"),
        write_task(folder, "likely", ANSWERS, 'kind: perplexity\nprompt: "{{ said }}"\nforgetting: true\n'),
    ]

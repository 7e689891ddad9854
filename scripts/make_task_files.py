"""Write docs/reference/task_files.md from the models of task files (`make schema`); a test compares."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from make_schema import shown_whole

from finetune.evaluation import task_keys, tasks
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from pydantic import BaseModel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "task_files.md"
HEAD = """\
# Task files

<!-- made by scripts/make_task_files.py -->

`eval.tasks` takes two forms of task files, and the names of lm-eval's own tasks
([guide](../guides/write_tasks.md)).

```yaml
# colors.yaml. The lines of colors.jsonl: {"question": "...", "choices": ["red", "blue"], "gold": 1}
data: colors.jsonl
kind: multiple_choice
prompt: "Question: {{ question }}\\nAnswer:"
choices: "{{ choices }}"
answer: "{{ gold }}"
```

Evaluate a run on it: `finetune evaluate runs/my-run --tasks colors.yaml`.

A task file is data, whoever wrote it. finetune reads the keys below and refuses every other key and value.
A metric, an aggregation, a filter or a sampler is a name that lm-eval registers. It is never a path, a module
or a repository. Local files need a known suffix. finetune fetches no address, opens no pickle and runs no
function. Templates run in the sandbox with limits, and each match of a pattern has a limit of {seconds:g} s.
A text has at most 20,000 characters and a name at most 200.
"""
OWN = "\n## finetune's own form\n\n"
THEIRS = """
## lm-eval's form

finetune takes a file for this form if it has `dataset_path`, `output_type`, `include`, `group` or
`custom_dataset` at the top level. `include` names files in the folder of the task, and at most {deepest} in a
row. finetune refuses tags, anchors and aliases.

"""
WORDS = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean"}


def page() -> str:
    """docs/reference/task_files.md."""
    text = HEAD.replace("{seconds:g}", f"{tasks.limited_patterns.SECONDS:g}") + OWN + table(tasks.Task)
    text += THEIRS.format(deepest=tasks.lm_eval_tasks.DEEPEST)
    for place, model in task_keys.KEYS.items():
        key = place.removeprefix("task").removeprefix(".")
        text += (f"\n### {key}\n\n" if key else "") + table(model)
    text += (
        "\n### Keys that are not supported\n\nlm-eval also has these keys. finetune stops with an error:\n\n"
    )
    text += "".join(f"- `{key}`: {why}\n" for key, why in task_keys.REFUSED.items())
    text += "- `group` and `task` with a list: name each task in `eval.tasks`\n"
    return text


def table(model: type[BaseModel]) -> str:
    told = upstream_options.texts_beside_fields(Path(inspect.getfile(model)), model.__name__)
    schema = model.model_json_schema()
    text = "| key | default | values | what it does |\n|---|---|---|---|\n"
    for key, described in schema["properties"].items():
        default = (
            "required" if key in schema.get("required", ()) else f"`{json.dumps(described.get('default'))}`"
        )
        what = shown_whole(" ".join(told.get(key, "").split()))
        text += f"| `{key}` | {default} | {values(described)} | {what} |\n"
    return text


def values(described: dict[str, Any]) -> str:
    """The values of a key, in words."""
    if "anyOf" in described:
        parts = [values(part) for part in described["anyOf"] if part.get("type") != "null"]
        return ", ".join(dict.fromkeys(parts))
    if "$ref" in described:
        return "keys, below"
    if "enum" in described or "const" in described:
        return ", ".join(
            f"`{json.dumps(one)}`".replace('"', "") for one in described.get("enum", [described.get("const")])
        )
    kind = described.get("type", "")
    if kind == "array":
        return f"list of: {values(described['items'])}"
    if kind == "object":
        inner = described.get("additionalProperties")
        patterns = described.get("patternProperties", {})
        inner = inner if isinstance(inner, dict) else next(iter(patterns.values()), {})
        return f"mapping to: {values(inner)}" if inner else "mapping"
    limits = (
        ("minimum", "from {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "to {}"),
        ("exclusiveMaximum", "below {}"),
    )
    said = [form.format(described[limit]) for limit, form in limits if limit in described]
    name = "pattern" in described and re.match(r"\^\[\^", described["pattern"])
    return " ".join(["a name" if name else WORDS.get(kind, ""), *said])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")

"""Write the JSON schema of recipes and docs/reference/recipe.md (`make schema`); tests compare."""

# ruff: noqa: E501 (lines of Markdown are not wrapped)
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from finetune.core.shipped_files import SCHEMA
from finetune.recipe.build import ADALORA_KEYS, LORA_KEYS, PEFT_KEYS, json_schema
from finetune.recipe.schema import Train

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "recipe.md"
HEAD = """\
# Recipe keys

<!-- made by scripts/make_schema.py -->

```yaml
model: {name: examples/tiny_llama/model}
data: {name: examples/tiny_llama/data/train.jsonl}
adapter: {type: lora}
```

These three keys are required. Every key can also be set on the command line: `data.packing=true`.

`finetune check RECIPE` finds mistakes in a recipe and in the first examples. `recipe.resolved.yaml` in the run folder has the
value of every key. For completion in an editor, start the file with this comment and the path to
[the schema](../../finetune/recipe/recipe.schema.json): `# yaml-language-server: $schema=PATH`.

| environment variable | effect |
|---|---|
| `FINETUNE_CACHE` | folder of prepared data, module names and measured rates; by default `~/.cache/finetune` |
| `HF_TOKEN` | token of the Hugging Face Hub |
| `HF_HUB_OFFLINE` | `1`: never ask the Hub |
| `FINETUNE_STORAGE` | storage of [a sweep](../guides/sweep.md) |
| `FINETUNE_TIMEOUT_SECONDS` | time limit for a process of [a launch](../guides/multi_gpu.md) that does not answer (1800) |
"""
BELOW = {
    "Source": ("data.name", "an item with keys of its own"),
    "Expect": ("data.expect", ""),
    "Qat": ("speed.qat", ""),
}
ADAPTER = """
PEFT's own keys, by type. PEFT's documentation and the schema describe them:
"""
TRAIN = """
Keys of TRL's SFTConfig. TRL's documentation and the schema describe them:
"""


def page() -> str:
    """docs/reference/recipe.md."""
    schema = json_schema()
    kinds = schema["$defs"]
    text = HEAD
    for section, described in schema["properties"].items():
        text += f"\n## {section}\n\n"
        if section == "adapter":
            text += adapter(kinds, described["discriminator"]["mapping"])
            continue
        its = kinds[section.capitalize()]["properties"]
        own = {key: value for key, value in its.items() if section != "train" or key in Train.model_fields}
        text += table(own, section)
        if section == "train":
            text += f"{TRAIN}\n{names(its.keys() - own.keys())}.\n"
        for kind, (key, what) in BELOW.items():
            if key.startswith(f"{section}."):
                text += f"\n### {key}{f': {what}' if what else ''}\n\n{table(kinds[kind]['properties'], key)}"
    return text


def adapter(kinds: dict[str, Any], types: dict[str, str]) -> str:
    ours = {**PEFT_KEYS, **LORA_KEYS, **ADALORA_KEYS}
    every = {name: kinds[where.rpartition("/")[2]]["properties"] for name, where in types.items()}
    shared = {key: its[key] for its in every.values() for key in ours if key in its}
    rows = {"type": {"description": "The method, from the table below."}}
    for key in ours:
        rows[key] = {**shared[key], "description": f"{shared[key]['description']} {of(key, every)}".strip()}
    text = table(rows, "adapter") + ADAPTER + "\n| type | keys |\n|---|---|\n"
    alike: dict[str, list[str]] = {}
    for name, its in sorted(every.items()):
        alike.setdefault(names(its.keys() - ours.keys() - {"type"}) or "none", []).append(name)
    return text + "".join(f"| {names(found)} | {keys} |\n" for keys, found in alike.items())


def of(key: str, every: dict[str, Any]) -> str:
    """Which types have it, if only some do."""
    having = [name for name in sorted(every) if key in every[name]]
    return f"Of {names(having)}." if len(having) < 10 else ""


def names(keys: Any) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))


def table(keys: dict[str, Any], section: str = "") -> str:
    """A table of keys. Each key of a section has an anchor, such as #model-name."""
    text = "| key | default | values | what it does |\n|---|---|---|---|\n"
    for key, described in keys.items():
        told = "default" in described and "$ref" not in described
        shown = f"`{json.dumps(described['default'])}`" if told else ""
        what = " ".join(described.get("description", "").split())
        text += "| {} |\n".format(
            " | ".join([anchor(section, key), shown, values(described), shown_whole(what)])
        )
    return text


def anchor(section: str, key: str) -> str:
    place = f"{section}-{key}".replace(".", "-")
    return f'<a id="{place}"></a>`{key}`' if section else f"`{key}`"


def shown_whole(text: str) -> str:
    """As Markdown that hides nothing: outside `code` a <word> would be HTML."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(parts))


def values(described: dict[str, Any]) -> str:
    """What may stand there, in words."""
    if "anyOf" in described:
        parts = [values(part) for part in described["anyOf"] if part.get("type") != "null"]
        return ", ".join(part for part in parts if part)
    if "$ref" in described:
        return "keys, below"
    if "enum" in described or "const" in described:
        return ", ".join(f"`{value}`" for value in described.get("enum", [described.get("const")]))
    if "pattern" in described:
        (kinds,) = re.findall(r"^\^\(?([a-z0-9_|]+)\)?:", described["pattern"])
        return ", ".join(f"`{kind}:N`" for kind in kinds.split("|"))
    kind = described.get("type", "")
    if kind == "array":
        return f"a list of: {values(described['items'])}"
    if kind == "object":
        of_each = described["additionalProperties"]
        return f"name: {values(of_each) if 'enum' in of_each else 'name'}"
    limits = [
        ("minimum", "from {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "to {}"),
        ("exclusiveMaximum", "below {}"),
    ]
    said = [form.format(described[limit]) for limit, form in limits if limit in described]
    word = {
        "string": "string",
        "integer": "integer",
        "number": "number",
        "boolean": "boolean",
        "": "",
    }[kind]
    return " ".join([word, *said])


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {SCHEMA}, {PAGE}")

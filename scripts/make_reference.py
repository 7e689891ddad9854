"""Write the generated pages of docs/reference from code and measurements (`make schema`); a test compares.

python scripts/make_reference.py
"""

# ruff: noqa: E501 (lines of Markdown are not wrapped)
from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

import launch_matrix
from pydantic import TypeAdapter

from finetune.core import shipped_files
from finetune.core.error_codes import CODES
from finetune.core.errors import Exit
from finetune.recipe import adapter_types, loader
from finetune.run_folder import file_shapes

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
MADE = "<!-- made by scripts/make_reference.py -->\n\n"
EXITS = {
    Exit.DONE: ("The command did its work.", "Read the results."),
    Exit.INPUT: ("The recipe, the data or the command line has a mistake.", "Follow `help:`."),
    Exit.ENVIRONMENT: (
        "A package, the hardware, the network or credentials are missing.",
        "Run `finetune doctor`.",
    ),
    Exit.ARTIFACT: (
        "A checkpoint, adapter or run does not verify.",
        "Do not use it. The message names a valid one.",
    ),
    Exit.TRAINING: (
        "Training failed: NaN or Inf, out of memory, or a run check.",
        "Read the message and change the recipe.",
    ),
    Exit.STOPPED: (
        "A signal or `--until` stopped the run, which is saved.",
        "Continue with `--resume=auto`.",
    ),
}
FAMILIES = {
    "quickstart": "The quickstart",
    "gpus": "Llama 3.1 8B, by the memory of one GPU",
    "llama3_8b": "Llama 3.1 8B, by method",
    "llama3_1b": "Llama 3.2 1B, by method",
    "mistral_7b": "Mistral 7B, by method",
    "qwen3_8b": "Qwen3 8B, by method",
    "qwen3_30b_a3b": "Qwen3 30B-A3B, a mixture of experts",
    "gpt_oss_20b": "gpt-oss 20B, a mixture of experts",
    "adapters": "More methods on the quickstart's model",
    "isc25": "Eight H100s",
    "baselines": "Baselines of speed claims",
}


def pages() -> dict[Path, str]:
    """The content of each page."""
    return {
        REFERENCE / "exit_codes.md": exit_codes(),
        REFERENCE / "error_codes.md": error_codes(),
        REFERENCE / "adapters.md": adapters(),
        REFERENCE / "recipe_gallery.md": gallery(),
        REFERENCE / "launch_matrix.md": matrix(),
        REFERENCE / "run_folder_fields.md": run_folder_fields(),
        ROOT / "docs" / "llms.txt": llms(),
    }


def exit_codes() -> str:
    text = "# Exit codes\n\n" + MADE
    text += "```bash\nfinetune check quickstart\necho $?   # 0\n```\n\n"
    text += "| code | name | meaning | next |\n|---|---|---|---|\n"
    for code, (meaning, what_next) in EXITS.items():
        text += f"| {int(code)} | `{code.name}` | {meaning} | {what_next} |\n"
    text += "| 130 | | Ctrl-C, and there was nothing to save. | Run the command again. |\n\n"
    return text + (
        "`finetune train --accelerate` and `python -m finetune.launch` end with the code of the process that "
        "failed first.\nPlain `accelerate launch` ends with 1 for every failure.\n"
    )


def error_codes() -> str:
    text = "# Error codes\n\n" + MADE
    text += (
        "Each error ends with its code in brackets. The codes are stable. A command explains them too:\n\n"
    )
    text += "```bash\nfinetune explain unknown-key\n```\n"
    for code, meaning in CODES.items():
        text += f"\n## {code}\n\n{meaning}\n"
    return text


def adapters() -> str:
    """Each adapter type: its defaults, the quantizations that it supports, its usual learning rates."""
    text = "# Adapter methods\n\n" + MADE
    text += "```yaml\nadapter: {type: dora, r: 16}\n```\n\n"
    text += (
        "A type takes the keys of PEFT's config with the same name ([all keys](recipe.md#adapter)). The column "
        "of defaults\nshows where finetune differs from PEFT. The column of quantizations lists the values of "
        "`model.quantization`\nthat the type supports, next to `none`.\n\n"
        "| type | finetune's defaults | quantized base models | usual learning rates | merge |\n"
        "|---|---|---|---|---|\n"
    )
    refused = []
    for name, kind in sorted(adapter_types.all_types().items()):
        if kind.refused:
            refused.append(name)
            continue
        fits = [s for s in adapter_types.QUANTIZED if not adapter_types.unsupported_reason(name, s)]
        stored = kind.storage or (
            "all" if fits == list(adapter_types.QUANTIZED) else ", ".join(fits) or "none"
        )
        defaults = ", ".join(
            f"`{key}: {value}`" for key, value in (kind.defaults if kind.peft else {}).items()
        )
        rates = "{:g} to {:g}".format(*kind.learning_rate) if kind.learning_rate else ""
        merges = "no" if adapter_types.unmerged(name, {}) else "yes"
        text += f"| `{name}` | {defaults} | {stored} | {rates} | {merges} |\n"
    text += "\n## Types that are not supported\n\n"
    text += "These types of PEFT do not fit supervised fine-tuning. `finetune check` prints the reason: "
    text += ", ".join(f"`{name}`" for name in refused) + ".\n\n"
    return text + ("[Choose a method](../guides/choose_method.md) has measured quality, time and memory.\n")


def gallery() -> str:
    """Each shipped recipe with its purpose, and its planned and measured step where a benchmark has one."""
    gpu, plans = (_measured(name) for name in ("gpu", "plan"))
    text = "# Recipe gallery\n\n" + MADE
    text += "```bash\nfinetune recipes                         # list them\n"
    text += "finetune recipes quickstart              # print one\n"
    text += "finetune recipes quickstart --copy new   # copy one with its files\n```\n\n"
    text += (
        "Every command takes these names in place of a file. No recipe for a model with billions of parameters "
        "has been\ntrained to its end yet.\n"
    )
    found = shipped_files.recipes()
    for family, title in FAMILIES.items():
        own = {name: path for name, path in found.items() if name.partition("/")[0] == family}
        planned = family == "gpus"
        text += f"\n## {title}\n\n| name | method | purpose |{' planned | measured |' if planned else ''}\n"
        text += "|---|---|---|" + ("---|---|" if planned else "") + "\n"
        for name, path in own.items():
            recipe = loader.load(path)
            row = f"| `{name}` | {recipe.adapter.type} | {_cell(shipped_files.purpose(path))} |"
            if planned:
                stem = name.partition("/")[2]
                row += f" {_planned(plans.get(stem), gpu.get(stem))} | {_ran(gpu.get(stem))} |"
            text += row + "\n"
        if planned:
            text += (
                "\nThe architecture has random weights, and an H200 whose allocator has no more memory than "
            )
            text += (
                "such a GPU ran\nthe recipe. The memory is the memory of that GPU. The speed is the speed of "
            )
            text += "the H200.\n"
    return text


def _planned(plan: dict[str, Any] | None, row: dict[str, Any] | None) -> str:
    if not plan or not row:
        return ""
    rate = row["real_tokens_per_step"] / plan["planned_seconds"]
    return f"{plan['planned_gib']:.1f} GiB, {rate:,.0f} tokens/s"


def _ran(row: dict[str, Any] | None) -> str:
    return f"{row['peak_gib']:.1f} GiB, {row['tokens_per_second']:,.0f} tokens/s" if row else ""


def matrix() -> str:
    """Which launch config trains which method; the settings of NCCL that were measured."""
    text = "# Launch matrix\n\n" + MADE
    text += "```bash\nfinetune check quickstart adapter.type=dora\n```\n\n"
    text += (
        "Rows are the configs in `accelerate_configs/`, columns are methods and base models. `yes`: a test or a "
        "benchmark\ntrained it, on GPUs or on two CPU processes. `no (N)`: finetune stops with the reason N "
        "below. Without a GPU, only\n`cpu`, `cpu_2` and DeepSpeed's configs are accepted. "
        "`on experts`: the adapter is also on the stacked\nexperts of a mixture.\n\n"
    )
    text += launch_matrix.table()
    several = _measured("multi_gpu")
    text += "\n## NCCL settings\n\nLoRA on 8 layers of Llama 3.1 8B in bf16, two H100s with NVLink, one run "
    text += "each.\n\n| setting | DDP, tokens/s | FSDP2, tokens/s |\n|---|---|---|\n"
    for setting, name in NCCL.items():
        cells = [several.get(f"nccl-lora-bf16{kind}{name} x2") for kind in ("", "-fsdp2")]
        shown = [f"{row['tokens_per_second']:,.0f}" if row else "not measured" for row in cells]
        text += f"| {setting} | {' | '.join(shown)} |\n"
    return text


FIELDS_OF = (
    "environment.json", "data_report.json", "checks.json", "eval.json", "weights.json", "merge.json", "export.json",
)  # fmt: skip
WRITERS = {"Report": "Split"}  # class of data/audit.py -> its model in file_shapes.py


def run_folder_fields() -> str:
    """The fields of the JSON files of a run folder, from the models that check them."""
    text = "# Fields of the run folder\n\n" + MADE
    text += "```text\npython -m json.tool runs/quickstart/checks.json\n```\n\n"
    text += (
        "finetune checks these fields when it writes and reads a file of the [run folder](run_folder.md). "
        "A file may have\nmore fields. A field without a value is missing or null.\n"
    )
    sources = ("run_folder/file_shapes.py", "data/audit.py")
    docs = {key: doc for file in sources for key, doc in _docstrings(ROOT / "finetune" / file).items()}
    shown = set[str]()
    for file in FIELDS_OF:
        schema = TypeAdapter(file_shapes.SHAPES[file]).json_schema()
        models = schema.get("$defs", {})
        if "properties" in schema:
            text += f"\n## {file}\n\n{_fields(schema, docs)}"
        else:
            text += f"\n## {file}\n\nContent: {_type(schema)}.\n"
        for name in sorted(models.keys() - shown):
            text += f"\n### {name}\n\n{_fields(models[name], docs)}"
        shown |= models.keys()
    return text


def _docstrings(path: Path) -> dict[tuple[str, str], str]:
    """The docstring of each field of the classes in a file, by class and field."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            name, bases = WRITERS.get(node.name, node.name), [ast.unparse(base) for base in node.bases]
            found |= {(name, field): doc for (owner, field), doc in found.items() if owner in bases}
            for field, doc in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    found[name, ast.unparse(field.target)] = ast.literal_eval(doc.value)
    return found


def _fields(model: dict[str, Any], docs: dict[tuple[str, str], str]) -> str:
    """A table of a model's fields."""
    text = "| field | type | content |\n|---|---|---|\n"
    for name, field in model["properties"].items():
        text += f"| `{name}` | {_type(field)} | {docs.get((model['title'], name), '')} |\n"
    return text


def _type(schema: dict[str, Any]) -> str:
    """The type of a value in words, with a link to the table of a model."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if schema.get("type") == "array":
        return f"list of {_within(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of name: {_within(schema['additionalProperties'])}"
    return schema.get("type", "any value")


def _within(schema: dict[str, Any]) -> str:
    """The type of an item, in brackets if there are several."""
    text = _type(schema)
    return f"({text})" if " or " in text else text


PARTS = ("tutorials", "guides", "reference", "explanation")


def llms() -> str:
    """A list of all pages for language models (https://llmstxt.org), in the order of the site."""
    text = "# finetune\n\n> Fine-tune LLaMA-style language models from one recipe file, with a plan before the run, "
    text += "checks of the settings that ran, and a verdict with confidence intervals after it.\n\n"
    text += "Install from a clone with `make quickstart`. Every command accepts `--json`. A recipe needs "
    text += "`model.name`, `data.name` and `adapter.type`.\n"
    for part in PARTS:
        folder = ROOT / "docs" / part
        order = re.findall(
            r"```\{toctree\}\n:hidden:\n\n(.*?)```", (folder / "index.md").read_text(encoding="utf-8"), re.S
        )
        text += f"\n## {part.capitalize()}\n\n"
        for name in order[0].split():
            page = folder / f"{name}.md"
            title = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M) if page.exists() else None
            text += f"- [{title[1] if title else name}]({part}/{name}.md)\n"
    return text


NCCL = {
    "none": "",
    "`NCCL_P2P_DISABLE=1`": "-no-p2p",
    "`TORCH_NCCL_TRACE_BUFFER_SIZE=2000`, `TORCH_NCCL_DUMP_ON_TIMEOUT=1`": "-trace",
    "`NCCL_DEBUG=INFO`": "-debug",
    "`OMP_NUM_THREADS=8`": "-threads",
}


def _measured(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")

"""Write docs/guides/migrate.md from the tables that the importers use. A test keeps it current."""

# ruff: noqa: E501 (lines of Markdown are not wrapped)
from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.formatting import as_yaml
from finetune.importers import axolotl, common, llamafactory, prompt_formats, reading, trl

if TYPE_CHECKING:
    from finetune.importers.translation import Rule, Translation

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "migrate.md"
HEAD = """# Coming from axolotl, LLaMA-Factory or TRL

<!-- made by scripts/make_migration.py -->

Save this as `axolotl.yml`:

```text
base_model: examples/tiny_llama/model
datasets:
  - path: examples/tiny_llama/data/train.jsonl
    type: chat_template
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 256
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 0.0002
max_steps: 20
val_set_size: 0.05
```

```bash
pip install -e ".[export]" xllamacpp
finetune import axolotl.yml --verify --output from_axolotl.yaml
finetune check from_axolotl.yaml
finetune train from_axolotl.yaml train.output_dir=runs/from_axolotl
finetune export runs/from_axolotl --to gguf --quantize q8_0
llama-cli -m runs/from_axolotl/export-gguf-q8_0/from_axolotl-q8_0.gguf --jinja
```

These steps lead from the old config to a model that answers in llama.cpp. The export compares its token ids and answers with
finetune's. [Serve your model](serve.md) has the other servers.

`finetune import` detects the tool by its keys. It writes a recipe, and the recipe's comments list the result for every key:

| result | meaning |
|---|---|
| translated | the recipe has the value under another key |
| same as finetune's default | the recipe needs no key |
| differs by default | the tool and finetune have different defaults. The recipe keeps the default of the tool |
| not supported | the comment gives the reason and the nearest setting |

- `--from trl` sets the tool. A shell script with `trl sft ...` works too.
- `--gpus 4` is the number of GPUs that the old config used. finetune needs it to keep the effective batch size.
- In TRL's Python scripts and in configs of LLaMA-Factory's v1, finetune reads nothing. The error says what to do instead.
- finetune imports supervised fine-tuning only. For DPO, KTO, GRPO or pretraining, the error names the tool to stay with.

Read the list before you train: a key that is not supported may change the result.

## Compare the token ids

`--verify` reads the first batch of the data. It compares finetune's token ids and labels with the tool's ids and labels. For each
difference, it prints the number of examples:

- TRL is installed with finetune, so TRL itself prepares the batch.
- If axolotl or LLaMA-Factory is installed in the same environment, its own code prepares the batch.
- Otherwise, finetune uses its own small implementation of their prompt formats. For axolotl, these are `chat_template`, `alpaca` and
  `completion`. For LLaMA-Factory, these are the templates {templates}. Other formats and chats with tools are `not compared`.

Three differences are typical:

- LLaMA-Factory trains on a line break after the end of a turn.
- axolotl trains on the end of a turn only if this token is the EOS token or one of `eot_tokens`.
- axolotl has its own prompt for alpaca data.

To train on the tool's prompt, set `data.chat_template` to a Jinja file.

Chat templates keep their name only if finetune has a template that renders the same text. For the other names, finetune uses the
tokenizer's own template, and the list says so.
"""
SAMPLES: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "org/model",
        "load_in_4bit": True,
        "datasets": [{"path": "rows.jsonl", "type": "chat_template", "field_messages": "turns"}],
        "adapter": "qlora",
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        "chat_template": "llama3",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "warmup_ratio": 0.1,
        "val_set_size": 0.05,
        "num_epochs": 2,
        "evals_per_epoch": 2,
        "saves_per_epoch": 2,
        "deepspeed": "deepspeed_configs/zero2.json",
        "flash_attention": True,
        "special_tokens": {"pad_token": "<pad>", "eos_token": "</s>"},
        "wandb_project": "mine",
        "wandb_name": "first",
        "use_tensorboard": True,
    },
    "llamafactory": {
        "model_name_or_path": "org/model",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "quantization_bit": 4,
        "dataset": "mine",
        "template": "llama3",
        "flash_attn": "fa2",
        "neat_packing": True,
        "max_samples": 1000,
        "val_size": 0.1,
        "eval_strategy": "epoch",
        "use_galore": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "deepspeed": "examples/deepspeed/ds_z3_config.json",
    },
    "trl": {
        "model_name_or_path": "org/model",
        "dataset_name": "org/rows",
        "use_peft": True,
        "lora_r": 16,
        "lora_target_modules": "all-linear",
        "load_in_4bit": True,
        "attn_implementation": "flash_attention_2",
        "gradient_checkpointing": True,
        "dtype": "bfloat16",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
    },
}
RULES = {"axolotl": axolotl.RULES, "llamafactory": llamafactory.RULES, "trl": trl.RULES}


def page() -> str:
    """Return the content of docs/guides/migrate.md."""
    known = ", ".join(f"`{name}`" for name in sorted(prompt_formats.TEMPLATES))
    text = HEAD.replace("{templates}", known)
    for name, module in reading.TOOLS.items():
        text += f"\n## {module.TOOL}\n\nA typical config becomes:\n\n{_of_sample(name)}"
        text += f"\nOther keys of {module.TOOL}:\n\n{_of_rules(RULES[name])}"
    text += "\n## Arguments of the Trainer\n\nA key that `train:` has keeps its name. The other keys:\n\n"
    return text + _of_rules(common.TRAINER)


def _of_sample(tool: str) -> str:
    """Return the table of what the importer makes of a sample."""
    state = _imported(tool)
    lines = ["| key | value | result |", "|---|---|---|"]
    for entry in state.entries:
        value = as_yaml(entry.value)
        lines.append(f"| `{entry.key}` | `{_cell(value)}` | {entry.kind}: {_cell(entry.text)} |")
    return "\n".join(lines) + "\n"


def _imported(tool: str) -> Translation:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "theirs.yaml"
        path.write_text("".join(f"{key}: {as_yaml(value)}\n" for key, value in SAMPLES[tool].items()))
        return reading.import_recipe(path, tool)


def _of_rules(rules: dict[str, Rule]) -> str:
    """Return a table of rules. Keys with the same result share a row."""
    rows: dict[str, list[str]] = {}
    for key, rule in rules.items():
        if rule.target:
            result = f"translated: `{rule.target}`"
        elif rule.reason:
            result = f"not supported: {rule.reason}"
        else:
            result = f"needs no key: {rule.same}"
        rows.setdefault(result, []).append(f"`{key}`")
    kinds = ("translated", "needs", "not")
    ordered = sorted(rows.items(), key=lambda row: kinds.index(row[0].split(":")[0].split()[0]))
    lines = [f"| {', '.join(keys)} | {_cell(text)} |" for text, keys in ordered]
    return "\n".join(["| keys | result |", "|---|---|", *lines]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")

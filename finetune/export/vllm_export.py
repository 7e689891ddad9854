"""`--to vllm`: merged weights, or the adapter for vLLM's LoRA loader. SGLang reads the same folders."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from finetune.core import weight_files
from finetune.core.errors import Problem, UserError
from finetune.export import folder_export, vllm_rules
from finetune.export.export_job import ExportJob

KINDS = ("bf16", "f32")
ADDRESS = "http://localhost:8000/v1"


def check(_config: object, _quantize: str) -> None:
    """vLLM serves every model type that finetune trains, so there is nothing to refuse before the merge."""


def write(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the merged weights, and compare transformers' answers with the fine-tuned model's."""
    report: dict[str, Any] = {
        "files": folder_export.copy(job.source, folder),
        "serving_check": folder_export.check(folder, job, job.quantize),
        "notes": ["vLLM itself was not run: transformers read the files that vLLM reads"],
    }
    return report | serving(job.name)


def check_adapter(adapter: Path) -> int:
    """Return the `--max-lora-rank` for an adapter.

    Raises:
        UserError: vLLM's LoRA loader does not accept the adapter (exit 2).
    """
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    found = vllm_rules.refusals(config)
    if not found:
        names: list[str] = []
        for path in weight_files.find_weight_files(adapter):
            with weight_files.opened(path) as file:
                names += file.keys()
        found = [f"the tensor {name}" for name in vllm_rules.unexpected(names)[:3]]
    if found:
        raise UserError(
            Problem(
                "vLLM's LoRA loader does not accept this adapter",
                where=str(adapter),
                found=", ".join(found),
                fix="remove --adapter, so that finetune exports merged weights",
                why="see vllm/lora/peft_helper.py in vLLM",
                code="export",
            )
        )
    return vllm_rules.largest_rank(config) or vllm_rules.RANKS[-1]


def write_adapter(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the adapter, and compare PEFT's answers with the fine-tuned model's."""
    rank = check_adapter(job.source)
    report: dict[str, Any] = {"files": folder_export.copy(job.source, folder)}
    stored = job.stored
    without = f"in training, the base model was stored in {stored}" if stored else ""
    report["serving_check"] = folder_export.check(folder, job, "f32", without)
    ends = ", ".join(map(str, job.expected.stops))
    report["notes"] = [f"the generation_config.json of the base model must name the stop tokens {ends}"]
    lora = ["--lora-modules", f"{job.name}=."]
    serve = ["vllm", "serve", job.base, "--enable-lora", "--max-lora-rank", str(rank), *lora]
    sglang = [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        job.base,
        "--lora-paths",
        f"{job.name}=.",
    ]
    return report | {"serve": [shlex.join(serve), shlex.join(sglang)], "client": client(job.name)}


def serving(name: str) -> dict[str, Any]:
    """Return the commands that serve the folder of a whole model, and the script that asks the server."""
    serve = ["vllm", "serve", ".", "--served-model-name", name]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", ".", "--served-model-name", name]
    return {"serve": [shlex.join(serve), shlex.join(sglang)], "client": client(name)}


def client(name: str) -> list[str]:
    """Return the lines of a script that asks the server."""
    return [
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{ADDRESS}", api_key="-")',
        'messages = [{"role": "user", "content": "..."}]',
        f"answer = client.chat.completions.create(model={name!r}, messages=messages, temperature=0)",
        "print(answer.choices[0].message.content)",
    ]

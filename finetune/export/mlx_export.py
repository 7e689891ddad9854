"""`--to mlx`: merged weights, or the adapter, in the layout that mlx-lm loads."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import AutoConfig

from finetune.core import packages, regular_files, safe_files
from finetune.core.model_config import ModelConfig
from finetune.core.paths import writing
from finetune.data.chat_texts import render_chat
from finetune.data.encoding import Encoded
from finetune.data.examples import Example
from finetune.data.loss_mask import IGNORED
from finetune.export import folder_export, gguf_file, gguf_lora, mlx_families, serving_check
from finetune.export.export_job import ExportJob
from finetune.export.serving_check import AnswerToken, Reader

KINDS = ("bf16", "f32")
KEY = re.compile(r"model\.layers\.\d+\.(?P<key>[\w.]+)")
PACKAGE = "mlx_lm"


def check(config: ModelConfig, _quantize: str) -> None:
    """Raise a UserError if mlx-lm lacks the family or one of its features (exit 2)."""
    mlx_families.check(config)


def write(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the merged weights, and compare transformers' answers with the fine-tuned model's."""
    folder_export.copy(job.source, folder)
    write_names(folder)
    report: dict[str, Any] = {"files": folder_export.sizes(folder)}
    if installed():
        report["serving_check"] = _check(folder, job, job.quantize)
    else:
        report["serving_check"] = folder_export.check(folder, job, job.quantize)
        report["notes"] = ["mlx-lm itself was not run: transformers read the files that mlx-lm reads"]
    config: Any = job.config.get_text_config()
    if config.model_type == "gemma2":
        text = f"mlx-lm has no sliding window for Gemma 2; texts over {config.sliding_window} tokens differ"
        report["notes"] = [*report.get("notes", []), text]
    return report | {"serve": ["mlx_lm.server --model .", "mlx_lm.chat --model ."]}


def write_names(folder: Path) -> None:
    """Add the names of config.json that mlx-lm reads. transformers 5 writes others, and reads both."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    content |= mlx_families.names(config)
    safe_files.write_text(folder, "config.json", json.dumps(content, indent=2) + "\n")


def check_adapter(adapter: Path) -> None:
    """Raise a UserError if mlx-lm can't hold the adapter (exit 2)."""
    gguf_lora.check(adapter, "mlx-lm")


def write_adapter(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the adapter alone. mlx-lm applies it to the base model."""
    config: Any = job.config.get_text_config()
    with writing(folder):
        files = write_lora(job.source, config.num_hidden_layers, folder)
    serve = [f"mlx_lm.server --model {shlex.quote(job.base)} --adapter-path ."]
    report: dict[str, Any] = {"files": files, "serve": serve, "notes": missing_names(job)}
    if installed() and not job.stored:
        return report | {"serving_check": _check(folder, job, "f32")}
    why = "transformers can't read an adapter in mlx-lm's layout, and mlx-lm is not installed"
    why = f"in training, the base model was stored in {job.stored}" if job.stored else why
    return report | {"serving_check": {"reader": None, "not_run": why}}


def missing_names(job: ExportJob) -> list[str]:
    """Return a note if the config.json of a local base model lacks names that mlx-lm reads."""
    path = Path(job.base) / "config.json"
    if not path.is_file():
        return []
    content = regular_files.read_json(path, "model.name")
    wanted = mlx_families.names(job.config)
    lacking = sorted(key for key, value in wanted.items() if value is not None and content.get(key) != value)
    if not lacking:
        return []
    return [
        f"mlx-lm reads {path}, and needs other values of {', '.join(lacking)} there, because transformers 5 "
        "writes other names. Export merged weights, which have them: remove --adapter"
    ]


def _check(folder: Path, job: ExportJob, kind: str) -> dict[str, Any]:
    """Run the serving check with mlx-lm, which takes the tokenizer of an adapter from the base model."""
    with serving_check.readable(folder):
        if (folder / "config.json").exists():
            reader = reader_of(str(folder))
        else:
            reader = replace(
                reader_of(job.base, job.revision, folder),
                prompt_ids=None,
                stop_ids=None,
                without_ids="mlx-lm takes the tokenizer from the base model",
            )
        found = serving_check.run(reader, job.expected, kind)
    serving_check.refuse_different(found, folder)
    return found


def convert(adapter: Path, layers: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the config of an adapter for mlx-lm. It multiplies by transposed matrices.

    Args:
        layers: the number of layers of the model.

    Raises:
        UserError: mlx-lm has no place for a part of the adapter (exit 2).
    """
    config = gguf_lora.check(adapter, "mlx-lm")
    tensors, keys, unknown = dict[str, Any](), set[str](), list[str]()
    with gguf_file.opened(adapter) as source:
        for name in sorted(source.files):
            half = gguf_lora.HALF.fullmatch(name)
            key = half and KEY.fullmatch(half["module"])
            if not half or not key or ".experts" in name:
                unknown.append(name)
                continue
            keys.add(key["key"])
            tensors[f"{half['module']}.lora_{half['half'].lower()}"] = source.tensor(name).T.contiguous()
    gguf_lora.refuse_tensors("mlx-lm", unknown)
    rank = int(config["r"])
    lora = {
        "rank": rank,
        "scale": float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank),
        "dropout": 0.0,
        "keys": sorted(keys),
    }
    return tensors, {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": lora}


def write_lora(adapter: Path, layers: int, folder: Path) -> dict[str, int]:
    """Write the two files, and return them with their sizes."""
    tensors, config = convert(adapter, layers)
    contents = {"adapters.safetensors": save(tensors), "adapter_config.json": json.dumps(config).encode()}
    for name, content in contents.items():
        safe_files.write_bytes(folder, name, content)
    return {name: len(content) for name, content in contents.items()}


def installed() -> bool:
    """Return whether mlx-lm is installed. It also runs on CPUs of Linux (`pip install "mlx[cpu]" mlx-lm`)."""
    return packages.installed(PACKAGE)


def reader_of(model: str, revision: str | None = None, adapter: Path | None = None) -> Reader:
    """Open a model with mlx-lm. It computes in fp32, so that only the stored weights are compared.

    Args:
        model: a folder, or the name of a model on the Hub.
        adapter: the folder of an adapter in mlx-lm's layout.
    """
    mlx_lm, mx = importlib.import_module(PACKAGE), importlib.import_module("mlx.core")
    options: dict[str, Any] = {"adapter_path": str(adapter)} if adapter else {}
    opened, tokenizer = mlx_lm.load(model, revision=revision, **options)
    opened.set_dtype(mx.float32)
    return Reader(
        f"mlx-lm {importlib.metadata.version('mlx-lm')}",
        prompt_ids=lambda examples: [_prompt(tokenizer, example) for example in examples],
        answer=partial(_answer, opened, set(tokenizer.eos_token_ids)),
        stop_ids=lambda: set(tokenizer.eos_token_ids),
        losses=lambda documents: [_loss(opened, document) for document in documents],
    )


def _prompt(tokenizer: Any, example: Example) -> list[int]:
    """Return the token ids of a prompt as mlx-lm's server makes them: the template writes the BOS token."""
    if not example.messages:
        return list(tokenizer.encode(example.prompt or ""))
    text = render_chat(tokenizer, example.messages[:-1], example.tools)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _answer(model: Any, stops: set[int], prompt: list[int], room: int) -> list[AnswerToken]:
    mx, generate = importlib.import_module("mlx.core"), importlib.import_module("mlx_lm.generate")
    found = list[AnswerToken]()
    for token, scores in generate.generate_step(mx.array(prompt), model, max_tokens=room):
        found += serving_check.steps([int(token)], torch.tensor(scores.tolist())[None])
        if int(token) in stops:
            break
    return found


def _loss(model: Any, document: Encoded) -> tuple[float, float]:
    """Return the sum of the losses of a document's tokens, and their number or the sum of their weights."""
    mx = importlib.import_module("mlx.core")
    scores = torch.tensor(model(mx.array([document.ids]))[0].tolist()).log_softmax(-1)
    loss = count = 0.0
    for place, (label, weight) in enumerate(zip(document.labels(), document.token_weights(), strict=True)):
        if label != IGNORED and place and weight:
            loss, count = loss - weight * float(scores[place - 1, label]), count + weight
    return loss, count

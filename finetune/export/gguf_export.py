"""`--to gguf`: one GGUF file for llama.cpp, checked against the merged weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.core import packages, safe_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.model_config import ModelConfig
from finetune.core.paths import writing
from finetune.data.chat_texts import render_chat
from finetune.export import gguf_families, gguf_file, gguf_lora, gguf_readers, gguf_tokenizer, serving_check
from finetune.export.export_job import ExportJob
from finetune.export.gguf_families import Family, GgufTensor, in_pairs, rope_tensors
from finetune.export.gguf_file import Checkpoint
from finetune.models import token_limits

K_QUANTS = {"q2_k": 10, "q3_k_m": 12, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""What llama.cpp's own program quantizes: the name, and the number in `general.file_type`."""
KINDS = (*gguf_file.TYPES, *K_QUANTS)
QUANTIZER = "llama-quantize"
STORED = {torch.bfloat16: "bf16", torch.float16: "f16"}


EXPERT = re.compile(r"(?P<layer>.*\.)experts\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
FUSED = re.compile(r"(?P<layer>.*\.)experts\.(?P<part>gate_up_proj|down_proj)(\.weight)?")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def check(config: ModelConfig, quantize: str) -> None:
    """Check what is known before weights are loaded: the packages, the family and the quantization.

    Raises:
        UserError: the family or a feature is not supported (exit 2), or a program is missing (exit 3).
    """
    packages.require("gguf", "export", "--to gguf needs the package gguf")
    gguf_families.family_of(config.get_text_config())
    if quantize in K_QUANTS and shutil.which(QUANTIZER) is None:
        raise UserError(
            Problem(
                f"--quantize {quantize} needs llama.cpp's program {QUANTIZER}",
                found="not on PATH",
                fix=(
                    "install llama.cpp (`brew install llama.cpp`, or build it from source), or "
                    "use --quantize q8_0"
                ),
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        )


def write(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the GGUF file, read it back, and run the serving check."""
    config: Any = job.config.get_text_config()
    family = gguf_families.family_of(config)
    path = folder / f"{job.name}-{job.quantize}.gguf"
    with gguf_file.opened(job.source) as source:
        tensors = plan_tensors(list(source.files), config, family)
        entries = entries_of(job, family, rows_of(tensors, source))
        kind = "bf16" if job.quantize in K_QUANTS else job.quantize
        whole = folder / f"{job.name}-bf16.gguf" if job.quantize in K_QUANTS else path
        with writing(folder):
            gguf_file.write(whole, entries, tensors, source, kind)
            if whole != path:
                quantize_with_llama_cpp(whole, path, job.quantize)
        stored = {**entries, "general.file_type": file_type(job.quantize)}
        check_file(path, stored, tensors, source, job.quantize)
    report = {
        "files": {path.name: path.stat().st_size},
        "architecture": family.architecture,
        "tensors": len(tensors),
        "serving_check": check_serving(path, job),
        "notes": gguf_tokenizer.notes(job.tokenizer) + gguf_families.notes(config),
    }
    options = serving_options(config, f"-m {path.name}")
    return report | {"serve": [f"llama-server {options}", f"llama-cli {options}"]}


def check_adapter(adapter: Path) -> None:
    """Raise a UserError if a GGUF LoRA can't hold the adapter (exit 2)."""
    gguf_lora.check(adapter)


def write_adapter(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the adapter alone as a GGUF LoRA, read it back, and run it in llama.cpp on its base model."""
    path = folder / f"{job.name}-lora.gguf"
    with writing(folder):
        found = gguf_lora.write(path, job.source, job.config.get_text_config(), job.name, "f32")
    gguf_file.refuse_damaged(path, found)
    report: dict[str, Any] = {
        "files": {path.name: path.stat().st_size},
        "serving_check": check_lora(path, job),
    }
    config: Any = job.config.get_text_config()
    report["notes"] = gguf_families.notes(config)
    return report | {"serve": [f"llama-server {serving_options(config, f'-m BASE.gguf --lora {path.name}')}"]}


def serving_options(config: Any, files: str) -> str:
    """Return the options of llama.cpp that serve these files, with the context that the model has there."""
    short = token_limits.batch_limit(config)
    return f"{files} --jinja" + (f" --ctx-size {short}" if short else "")


def entries_of(job: ExportJob, family: gguf_families.Family, rows: int) -> dict[str, Any]:
    """Return all keys of the file."""
    config: Any = job.config.get_text_config()
    general = {"architecture": family.architecture, "type": "model", "name": job.name}
    kind = "bf16" if job.quantize in K_QUANTS else job.quantize
    numbers = {"file_type": gguf_file.TYPES[kind][1], "quantization_version": 2}
    found = {f"general.{key}": value for key, value in {**general, **numbers}.items()}
    found |= gguf_families.settings(config, family)
    return found | gguf_tokenizer.entries(
        job.tokenizer, rows, job.expected.stops, opens=opens(job), chats=writes_chats(job)
    )


def file_type(quantize: str) -> int:
    """Return the number of a quantization in `general.file_type`."""
    return K_QUANTS[quantize] if quantize in K_QUANTS else gguf_file.TYPES[quantize][1]


def writes_chats(job: ExportJob) -> bool:
    """Return whether a chat template writes the prompts of the run."""
    return bool(job.tokenizer.chat_template) and job.chats


def opens(job: ExportJob) -> bool:
    """Return whether prompts start with the BOS token: prompts of the evaluation, or else a short prompt."""
    tokenizer: Any = job.tokenizer
    if job.expected.prompts:
        prompt = job.expected.prompts[0]
    elif writes_chats(job):
        try:
            text = render_chat(tokenizer, [{"role": "user", "content": "a"}])
        except ValueError as error:  # the template needs another chat
            raise UserError(
                Problem(
                    "finetune can't find how prompts start without a validation set",
                    "data.chat_template",
                    found=str(error)[:200],
                    fix="--to vllm",
                    why="the chat template refuses a short chat",
                    code="chat-template",
                )
            ) from error
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        prompt = tokenizer("a")["input_ids"]
    return bool(prompt[:1] == [tokenizer.bos_token_id])


def rows_of(tensors: list[gguf_families.GgufTensor], source: gguf_file.Checkpoint) -> int:
    """Return the rows of the embedding, which can be more than the tokens."""
    (name,) = (tensor.sources[0] for tensor in tensors if tensor.name == "token_embd.weight")
    return source.shape(name)[0]


def quantize_with_llama_cpp(whole: Path, path: Path, kind: str) -> None:
    """Quantize a file with llama.cpp's own program, and delete the file that it was made from."""
    program = os.path.abspath(shutil.which(QUANTIZER) or QUANTIZER)
    words = [program, str(whole.absolute()), str(path.absolute()), kind.upper()]
    with tempfile.TemporaryDirectory() as empty:  # it would load backends from the working directory
        done = subprocess.run(words, capture_output=True, text=True, cwd=empty)
    if done.returncode or not path.exists():
        raise UserError(
            Problem(
                f"{QUANTIZER} failed",
                found=(done.stderr.strip().splitlines() or ["no output"])[-1],
                fix="--quantize q8_0",
                code="export",
            ),
            code=Exit.ENVIRONMENT,
        )
    safe_files.remove(whole.parent, whole.name)


def check_file(
    path: Path, entries: dict[str, Any], tensors: list[GgufTensor], source: Checkpoint, kind: str
) -> None:
    """Raise a UserError if the file does not hold the model (exit 4)."""
    wanted = {key: value for key, value in entries.items() if value is not None}
    gguf_file.refuse_damaged(path, gguf_file.differences(path, wanted, tensors, source, kind))


def check_serving(path: Path, job: ExportJob) -> dict[str, Any]:
    """Run the serving check with the best reader that is installed."""
    with serving_check.readable(path), gguf_readers.reader_of(path, job) as reader:
        found = serving_check.run(reader, job.expected, job.quantize, gguf_readers.NONE_INSTALLED)
    serving_check.refuse_different(found, path)
    return found


def check_lora(lora: Path, job: ExportJob) -> dict[str, Any]:
    """Run the serving check on a GGUF LoRA and its base model, which is written for the check only."""
    if job.stored:
        return {"reader": None, "not_run": f"in training, the base model was stored in {job.stored}"}
    if not gguf_readers.has_llama_cpp():
        return {"reader": None, "not_run": "llama.cpp is not installed; run `pip install xllamacpp`"}
    with tempfile.TemporaryDirectory(dir=lora.parent) as folder:
        base, kind = write_base(job, Path(folder))
        context = gguf_readers.context_of(job)
        with serving_check.readable(lora), gguf_readers.llama_cpp(base, context, lora) as opened:
            reader = opened and replace(
                opened,
                prompt_ids=None,
                stop_ids=None,
                without_ids="llama.cpp takes the tokenizer from the base model's file",
            )
            found = serving_check.run(reader, job.expected, kind)
    serving_check.refuse_different(found, lora)
    return found


def write_base(job: ExportJob, folder: Path) -> tuple[Path, str]:
    """Write the base model of an adapter as a GGUF file, and return the file and how it stores weights."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False}
    model: Any = AutoModelForCausalLM.from_pretrained(job.base, revision=job.revision, **options)
    kind = STORED.get(model.dtype, "f32")
    base = replace(job, source=folder / "model", config=model.config, quantize=kind)
    path, config = folder / "base.gguf", model.config.get_text_config()
    family = gguf_families.family_of(config)
    with writing(folder):
        model.save_pretrained(base.source)
        with gguf_file.opened(base.source) as source:
            tensors = plan_tensors(list(source.files), config, family)
            entries = entries_of(base, family, rows_of(tensors, source))
            gguf_file.write(path, entries, tensors, source, kind)
    return path, kind


def plan_tensors(names: Sequence[str], config: ModelConfig, family: Family) -> list[GgufTensor]:
    """Return the tensors of the GGUF file for the tensors of a checkpoint.

    Raises:
        UserError: llama.cpp has no tensor for one of them (exit 2).
    """
    table = gguf_families.tensor_names(config, family)
    planned, unknown = list[GgufTensor](), list[str]()
    tied = config.tie_word_embeddings
    for name, sources, compute in sorted(_parts(names)):
        if tied and name == "lm_head.weight":
            continue
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            unknown.append(name)
            continue
        step = _layout(name, config, family)
        planned.append(GgufTensor(found, sources, partial(_both, compute, step)))
    if unknown:
        raise UserError(
            Problem(
                "llama.cpp has no tensor for a weight of the model",
                found=", ".join(unknown[:5]),
                fix="--to vllm",
                code="export",
            )
        )
    planned += [
        GgufTensor(name, (), partial(_constant, value)) for name, value in rope_tensors(config).items()
    ]
    return planned


def _parts(names: Sequence[str]) -> list[tuple[str, tuple[str, ...], Any]]:
    """Return the name in llama.cpp's spelling, the tensors and the function of each part of the model.

    llama.cpp has one tensor for all experts of a layer. Checkpoints have one for each expert, or one for all
    gate and up projections.
    """
    found, experts = list[tuple[str, tuple[str, ...], Any]](), dict[str, dict[int, str]]()
    for name in names:
        if single := EXPERT.fullmatch(name):
            part = MIXTRAL.get(single["part"], single["part"])
            whole = f"{single['layer']}experts.{part}.weight".replace("block_sparse_moe", "mlp")
            experts.setdefault(whole, {})[int(single["number"])] = name
        elif fused := FUSED.fullmatch(name):
            if fused["part"] == "down_proj":
                found.append((f"{fused['layer']}experts.down_proj.weight", (name,), _first))
            else:
                for index, part in enumerate(("gate_proj", "up_proj")):
                    whole = f"{fused['layer']}experts.{part}.weight"
                    found.append((whole, (name,), partial(_half, index)))
        else:
            found.append((name, (name,), _first))
    for whole, numbered in experts.items():
        found.append((whole, tuple(numbered[number] for number in sorted(numbered)), torch.stack))
    return found


def _layout(name: str, config: ModelConfig, family: Family) -> Any:
    """Return what llama.cpp expects to be done to a tensor."""
    kind = re.search(r"self_attn\.(q|k)_proj\.(weight|bias)$", name)
    if family.permuted and kind:
        return partial(
            in_pairs, heads=config.num_attention_heads if kind[1] == "q" else config.num_key_value_heads
        )
    if family.norm_offset and name.endswith("norm.weight"):
        return partial(torch.add, other=torch.tensor(family.norm_offset))
    return None


def _both(
    compute: Callable[[list[torch.Tensor]], torch.Tensor],
    step: Callable[[torch.Tensor], torch.Tensor] | None,
    tensors: list[torch.Tensor],
) -> torch.Tensor:
    found = compute(tensors)
    return step(found) if step else found


def _first(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _half(index: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].chunk(2, dim=-2)[index]


def _constant(value: torch.Tensor, _: list[torch.Tensor]) -> torch.Tensor:
    return value

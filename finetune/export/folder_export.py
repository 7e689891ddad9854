"""A folder in the form of transformers, and transformers as the program that reads it."""

from __future__ import annotations

import contextlib
import io
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.core import safe_files
from finetune.core.paths import writing
from finetune.core.weight_files import find_weight_files
from finetune.data.chat_texts import render_chat
from finetune.data.examples import Example
from finetune.export import serving_check, staged_files
from finetune.export.export_job import ExportJob
from finetune.export.serving_check import AnswerToken, Reader
from finetune.models.generation_config import declared_stops


def copy(source: Path, folder: Path) -> dict[str, int]:
    """Copy the known files of a model or an adapter with its tokenizer; return the files with their sizes."""
    known = (*staged_files.ADAPTER, *staged_files.MODEL, *staged_files.TOKENIZER)
    files = [source / name for name in known if (source / name).is_file()]
    files += [*find_weight_files(source, ""), *source.glob(staged_files.TEMPLATES)]
    with writing(folder):
        for file in files:
            name = str(file.relative_to(source))
            safe_files.make_folder(folder, str(Path(name).parent))
            shutil.copyfile(file, folder / name)
    return sizes(folder)


def sizes(folder: Path) -> dict[str, int]:
    """Return the files of a folder with their sizes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def check(folder: Path, job: ExportJob, kind: str, without_answers: str = "") -> dict[str, Any]:
    """Run the serving check with transformers, which loads the exported folder by itself."""
    with serving_check.readable(folder):
        found = serving_check.run(_reader(folder, job, without_answers), job.expected, kind)
    serving_check.refuse_different(found, folder)
    return found


def _reader(folder: Path, job: ExportJob, without_answers: str) -> Reader:
    places = [place for place in (folder, folder / "base") if (place / "tokenizer_config.json").exists()]
    options: Any = {"trust_remote_code": False, "revision": "main" if places else job.revision}
    tokenizer: Any = AutoTokenizer.from_pretrained(str(places[0]) if places else job.base, **options)
    model = None
    if not without_answers:
        model = _decompressed(folder, job) if job.quantize in ("fp8", "int8") else _model(folder, job)
    answer = model and partial(_answer, model, job.expected.stops)
    losses = model and partial(serving_check.losses_of, model)
    stops = None
    if (folder / "generation_config.json").exists():
        stops = partial(declared_stops, GenerationConfig.from_pretrained(str(folder)))
    return Reader(
        f"transformers {transformers.__version__}",
        partial(_ids, tokenizer),
        answer,
        stops,
        losses,
        without_answers=without_answers,
    )


@torch.no_grad()
def _decompressed(folder: Path, job: ExportJob) -> Any:
    """Load weights of compressed-tensors, which draws bars that have no switch until the first token."""
    with contextlib.redirect_stderr(io.StringIO()):
        model = _model(folder, job)
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device))
    return model


def _model(folder: Path, job: ExportJob) -> Any:
    """Load the exported weights in fp32: a whole model, or the adapter on its base model."""
    options: Any = {"dtype": torch.float32, "trust_remote_code": False}
    if (folder / "config.json").exists():
        return AutoModelForCausalLM.from_pretrained(str(folder), **options).eval()
    if (folder / "base").is_dir():
        base: Any = AutoModelForCausalLM.from_pretrained(str(folder / "base"), **options)
        return PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    base = AutoModelForCausalLM.from_pretrained(job.base, revision=job.revision, **options)
    return PeftModel.from_pretrained(base, str(folder)).eval()


def _ids(tokenizer: PreTrainedTokenizerBase, examples: list[Example]) -> list[list[int]]:
    """Return prompts as vLLM makes them: the template writes the BOS token of a chat."""
    found = []
    for example in examples:
        if example.messages:
            text = render_chat(tokenizer, example.messages[:-1], example.tools)
            found.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            found.append(tokenizer(example.prompt or "")["input_ids"])
    return found


def _answer(
    model: PreTrainedModel | PeftModel, stops: list[int], prompt: list[int], room: int
) -> list[AnswerToken]:
    (tokens,), (logits,) = serving_check.answers(model, [prompt], stops, room)
    return serving_check.steps(tokens, logits)

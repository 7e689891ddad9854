"""Check that the saved weights are the trained weights: reopen them from disk and compare.

If no single GPU can hold the base model, one process does this on all GPUs while the others wait.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune.adapters import initialization, trainable_parameters
from finetune.autoconfig.machine_setup import Setup
from finetune.core import safe_files, upstream_private
from finetune.core.errors import Exit, UserError
from finetune.core.run_checks import RunChecks
from finetune.core.weight_files import find_weight_files
from finetune.distributed import sharded_tensors
from finetune.evaluation import scoring
from finetune.models import fingerprint, model_class
from finetune.quantization import fp8_loading
from finetune.recipe.adapter_types import FOUR_BIT
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

PROBE_ROWS, PROBE_TOKENS = 4, 512  # number and length of the test sequences for the logits
TOLERANCE = 1e-2  # relative difference of logits if sums may run in another order: on a GPU, or compiled
ROUNDED = 5e-2  # relative difference with an fp8 base model, where the last bit may change a quantized value
# Relative difference of logits if training rounds weights in another way: for an adapter whose initialization
# modifies the base model, and for weights that FSDP gathers in 16 bits, with norms and adapters. The trained
# tensors themselves are compared bit for bit.
ROUNDED_TO = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Relative difference for COFT's rotations. PEFT projects them in each forward pass, and a second projection
# changes the last bits (peft 0.21.2, tuners/oft/layer.py).
PROJECTED = 1e-6


class Live(NamedTuple):
    """The properties of the trained model that the saved weights must reproduce."""

    tensors: dict[str, str]  # hash of each trained tensor in fp32, by name
    shapes: dict[str, torch.Size]
    rows: list[list[int]]
    logits: list[torch.Tensor]
    base: str
    """Name of the base model, and its commit if it is from the Hub."""
    bound: float
    """Largest relative difference of logits; 0: bit for bit."""


def remember(adapted: Any, dataset: Any, setup: Setup) -> Live:
    """Return the trained tensors and the logits of the first sequences, which the saved weights must
    reproduce.

    On a CPU, the same operations run in the same order after loading, so no bit may differ.
    """
    exact, split = setup.hardware.device == "cpu", setup.launch.sharded and setup.launch.precision != "no"
    split = (
        split and setup.storage.value not in FOUR_BIT
    )  # 4-bit weights are gathered as stored (four_bit.fsdp_policy)
    rows = [row["input_ids"][:PROBE_TOKENS] for row in islice(dataset, PROBE_ROWS)]
    bound = 0.0 if exact else TOLERANCE
    by_torchao = any(type(module).__name__ == "Float8Linear" for module in adapted.modules())
    if not exact and (by_torchao or getattr(adapted, "quantization_method", None) == fp8_loading.METHOD):
        bound = ROUNDED
    if initialization.rebases(adapted):
        bound = max(bound, ROUNDED_TO[adapted.get_input_embeddings().weight.dtype])
    if getattr(getattr(adapted, "peft_config", {}).get("default"), "coft", False):
        bound = max(bound, PROJECTED)
    if split:  # in addition to the rounding of quantized weights
        gathered = ROUNDED_TO[getattr(torch, setup.compute_dtype)]
        bound = bound + gathered if bound == ROUNDED else max(bound, gathered)
    config: Any = adapted.config
    base = f"{config.name_or_path} {upstream_private.commit_hash(config) or ''}".strip()
    shapes = {name: sharded_tensors.shape(tensor) for name, tensor in _to_save(adapted).items()}
    with torch.compiler.set_stance("force_eager"):  # the loaded model is not compiled either
        logits = scoring.logits(adapted, rows)
    return Live(hashes(adapted, shapes), shapes, rows, logits, base, bound)


def fingerprints(adapted: torch.nn.Module) -> dict[str, str]:
    """Return a hash of each trainable tensor in fp32, because PEFT may load it in another dtype."""
    sharded_tensors.give_back(adapted)
    return {
        name: fingerprint.fingerprint({name: sharded_tensors.in_fp32(p)})
        for name, p in trainable_parameters.trainable(adapted).items()
    }


def add_moved_check(before: dict[str, str], adapted: torch.nn.Module, steps: int, checks: RunChecks) -> None:
    """Count the trainable tensors that differ from `before`, by kind."""
    after = fingerprints(adapted)
    if other := sorted(before.keys() ^ after.keys()):
        checks.add(
            "trainable parameters",
            expected="the same as at the start of training",
            actual=f"{len(other)} that were added or removed, such as {other[0]}",
            how="names with requires_grad; a callback must not change them",
        )
    moved = Counter(family(name) for name in after if after[name] != before.get(name))
    totals = Counter(map(family, after))
    actual = ", ".join(f"{name} {moved[name]} of {totals[name]}" for name in sorted(totals))
    # LoRA's A stands still until B has moved, and nothing moves in a first step of warm-up
    long = steps >= 4
    checks.add(
        "trained weights changed",
        expected="at least one tensor of each kind" if long else "at least one tensor",
        actual=actual,
        how="hash of every trainable tensor, before and after",
        ok=(all if long else any)(moved[name] for name in totals),
    )


def family(name: str) -> str:
    """Return `lora_A` for `...q_proj.lora_A.default.weight`, and `weights` for the base model."""
    before, named, _ = name.partition(".default")
    return before.rpartition(".")[2] if named else "weights"


def hashes(adapted: nn.Module, shapes: dict[str, torch.Size]) -> dict[str, str]:
    """Return fp32 hashes of the tensors that the files must hold, by name.

    If a saved tensor is larger, the trained tensor is its first part: PiSSA and similar initializations are
    saved as [A | A0] and [B | -B0], which subtracts their initial values.
    """
    sharded_tensors.give_back(adapted)
    named, digests = {**dict(adapted.named_parameters()), **_to_save(adapted)}, {}
    for name, shape in shapes.items():
        if name in named and len(sharded_tensors.shape(named[name])) == len(shape):
            tensor = sharded_tensors.whole(named[name]).detach().float()[tuple(slice(size) for size in shape)]
            digests[name] = fingerprint.fingerprint({name: tensor})
    return digests


def _to_save(adapted: nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained tensors. For virtual tokens, return the vectors that PEFT saves, not the network."""
    config: Any = getattr(adapted, "peft_config", {}).get("default")
    if config is not None and config.is_prompt_learning:
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return dict(trainable_parameters.trainable(adapted))


def add_file_checks(folder: RunFolder, live: Live, steps: int, checks: RunChecks) -> None:
    """Check that the saved file has no empty tensor, no trained tensor of zeros, and the right base model."""
    if folder.weights != folder.adapter:
        return
    zero, empty, count = [], [], 0
    trained = {re.sub(r"(\.modules_to_save)?\.default", "", name) for name in live.tensors}
    with safe_open(folder.adapter / "adapter_model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensor, count = file.get_tensor(name), count + 1
            if not tensor.numel():
                empty.append(name)
            elif name in trained and not tensor.any():
                zero.append(name)
    config = json.loads((folder.adapter / "adapter_config.json").read_text(encoding="utf-8"))
    pruned = config["peft_type"] == "ADALORA"  # a module may have lost all ranks
    ok = count > 0 and (pruned or not empty) and (not zero or steps < 4)
    how, code = "adapter_model.safetensors", Exit.ARTIFACT
    checks.add(
        "saved file",
        expected="no empty tensor, no trained tensor of zeros",
        actual=f"{count} tensors, {len(empty)} empty, {len(zero)} trained ones zero",
        how=how,
        ok=ok,
        code=code,
    )
    base = f"{config['base_model_name_or_path']} {config['revision'] or ''}".strip()
    checks.add("base model of the adapter", live.base, base, "adapter_config.json", code=code)


def add_saved_checks(live: Live, folder: RunFolder, checks: RunChecks) -> None:
    """Compare the files with the trained tensors, if no process can load the model next to the others.

    Experts have other names in transformers' files, and are read on the CPU as transformers reads them.
    """
    # a magnitude has no `.weight` on disk
    on_disk = re.compile(r"(?<=magnitude_vector)\.default\.weight$|(\.modules_to_save)?\.default(?=\.|$)")
    names, same = {on_disk.sub("", name): name for name in live.tensors}, dict[str, bool]()
    for path in find_weight_files(folder.weights, ""):
        with safe_open(path, framework="pt") as file:
            for key in names.keys() & set(file.keys()):
                name = names[key]
                same[name] = live.tensors[name] == fingerprint.fingerprint(
                    {name: file.get_tensor(key).float()}
                )
    how = "hash of every trained tensor, live and in the files"
    if folder.weights == folder.model and len(same) < len(names):
        unset_hf_deepspeed_config()  # as in reopen.open_base
        opened = model_class.open_folder(folder.model, dtype=torch.float32)
        saved_hashes, how = hashes(opened, live.shapes), f"{how}, as transformers reads them"
        same = {name: live.tensors[name] == digest for name, digest in saved_hashes.items()}
    equal = sum(same.values())
    checks.add("saved tensors", f"all {len(live.tensors)}", f"all {equal}", how, code=Exit.ARTIFACT)


def check_reopened(live: Live, reopened: PreTrainedModel, folder: RunFolder, checks: RunChecks) -> None:
    """Add run checks that the saved tensors and their logits equal the trained ones."""
    code = Exit.ARTIFACT
    same = hashes(reopened, live.shapes)
    equal = sum(same.get(name) == digest for name, digest in live.tensors.items())
    checks.add(
        "saved tensors",
        expected=f"all {len(live.tensors)}",
        actual=f"all {equal}",
        how="hash of every trained tensor, live and reopened from disk",
        code=code,
    )
    pairs = zip(live.logits, scoring.logits(reopened, live.rows), strict=True)
    difference = max(float(torch.linalg.norm(a - b) / torch.linalg.norm(a)) for a, b in pairs)
    bound = live.bound
    checks.add(
        "saved weights",
        expected="the live model's logits" + (f" within {bound:g}" if bound else " bit for bit"),
        actual=f"{difference:g}",
        how=f"reopened from disk: ||live - reopened|| / ||live||, the largest of {len(live.rows)} rows",
        ok=difference <= bound,
        code=code,
    )
    check(folder, checks)


def check(folder: RunFolder, checks: RunChecks) -> None:
    """Run the checks after weights are saved, and move weights aside that do not verify."""
    try:
        checks.check()
    except UserError:
        set_aside(folder)
        raise


def set_aside(folder: RunFolder) -> None:
    """Move the weights and their scores aside, so that no command takes the run for finished."""
    if PartialState().is_main_process:
        weights, scores = folder.weights.name, run_folder.EVALUATED
        aside = f"{weights}.unverified"
        safe_files.remove(folder.path, aside)  # from an earlier attempt of this run
        safe_files.rename(folder.path, weights, aside)
        if (folder.path / scores).exists():
            safe_files.rename(folder.path, scores, f"{aside}/{scores}")

"""Find modules of a saved adapter that the model does not have in this layout, or that would not train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.adapters import expert_targets, untrainable_layers
from finetune.core import untrusted_files
from finetune.core.errors import Problem
from finetune.models import checkpoint_headers, module_names
from finetune.models.module_names import Names

INIT_FROM = "adapter.init_from"
MERGED = "merge it into its own base model with PEFT (merge_and_unload), and set model.name to the result"


def _lost_options(config: dict[str, Any]) -> str:
    """Return an option that PEFT loses when it stacks one module per expert (peft 0.21.2); else nothing."""
    if config.get("use_rslora"):
        return "use_rslora: true"
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(key) or ():
            last = pattern.rpartition(".")[2]
            if last in expert_targets.OLD_NAMES or not re.fullmatch(r"\w+", last):
                return f"{key}: {pattern}"[:200]
    return ""


def check_layout(folder: Path, names: Names, peft: str) -> list[Problem]:
    """Return a problem if the adapter stores experts in another layout, or would not train.

    transformers 4 has one module per expert, and transformers 5 stacks them in two parameters. PEFT converts
    a LoRA adapter from the first layout to the second for some families. For other families it would ignore
    the tensors of the experts with a warning.
    """
    stored = checkpoint_headers.stored(folder)
    tensors = {name.partition(".lora_")[0] for name in stored}
    apart = sorted(name for name in tensors if re.search(r"\.experts\.\d+\.", name))
    together = sorted(name for name in tensors if re.search(r"\.experts(\.base_layer)?$", name))
    stacked, listed = names.stacked_experts, any(".experts.0." in name for name in names.linear)
    converts = peft == "lora" and bool(expert_targets.rewritten(names))
    if apart and stacked and not converts:
        return [
            Problem(
                f"the adapter has one module per expert, but the experts of {names.family} are stacked",
                INIT_FROM,
                found=f"{len(apart)} modules, such as {apart[0]}",
                why="PEFT can't convert them for this family",
                fix=MERGED,
                code="adapter-files",
            )
        ]
    if apart and stacked:
        faults = list(checkpoint_headers.expert_faults(stored, quantized=False))
        if faults:
            return [checkpoint_headers.unlike_experts(faults, INIT_FROM, untrusted_files.SAVE_AGAIN)]
        if lost := _lost_options(untrusted_files.read_object(folder / "adapter_config.json", INIT_FROM)):
            return [
                Problem(
                    "PEFT would load the experts of this adapter with another scale",
                    INIT_FROM,
                    found=lost,
                    why="the adapter has one module per expert, and PEFT stacks them without this option",
                    fix="merge it with PEFT and transformers 4, and set model.name to the result",
                    code="adapter-option",
                )
            ]
    if together and listed and not stacked:
        return [
            Problem(
                f"the adapter has stacked experts, but {names.family} has one module per expert",
                INIT_FROM,
                found=f"{len(together)} modules, such as {together[0]}",
                why="PEFT can't split them",
                fix=MERGED,
                code="adapter-files",
            )
        ]
    reasons = untrainable_layers.reasons(names, peft)
    adapted = [f"{name.removeprefix('base_model.model.')}." for name in tensors]
    if lost := [name for name in reasons if any(one.startswith(f"{name}.") for one in adapted)]:
        layers = ", ".join(dict.fromkeys(map(module_names.short, lost)))
        return [
            Problem(
                f"the saved adapter would not train on {layers} here",
                INIT_FROM,
                found=f"{len(lost)} modules, such as {lost[0]}",
                why=reasons[lost[0]],
                fix=MERGED,
                code="no-gradient",
            )
        ]
    return []

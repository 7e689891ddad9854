"""Find the layers of a model on which an adapter would not train, before the adapter exists.

Some models read the weight of a layer and do not call the layer, such as Mamba's `dt_proj`. Fused kernels do
the same if they are installed. Other models use the output of a layer only for a choice. `all-linear` skips
such layers with a note. A recipe that names one is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from finetune.models import direct_reads
from finetune.models.module_names import Names, short

# Mamba's kernels read the weights of these layers directly, so PEFT refuses adapters of these types on them
# (peft 0.21.2, tuners/tuners_utils.py, _check_lora_target_modules_mamba).
_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_MAMBA_TYPES, _MAMBA_LAYERS = ("lora", "adalora", "randlora"), ("out_proj", "conv1d")
# Norms in the mixers of Mamba 2, by class. A fused kernel reads their weight and epsilon (transformers 5.22).
_FUSED_NORMS = frozenset(
    f"{family}RMSNormGated"
    for family in ("Bamba", "FalconH1", "GraniteMoeHybrid", "Mamba", "NemotronH", "Zamba2")
)
UNREAD = "the loss does not depend on their output"


def reasons(names: Names, peft: str) -> dict[str, str]:
    """Return why an adapter would not train on a module, by the full name of the module.

    Args:
        names: the names from `module_lists`, which know the modules without a gradient.
        peft: PEFT's name of the adapter type.
    """
    found = dict.fromkeys(refused_by_peft(names, peft), f"PEFT does not adapt them in {names.family}")
    found |= _read_by_kernels(names)
    found |= dict.fromkeys(names.without_gradient, UNREAD)
    return found | dict.fromkeys(
        names.uncalled, "the model reads at most their weights and does not call them"
    )


def refused_by_peft(names: Names, peft: str) -> set[str]:
    """Return the modules on which PEFT refuses this adapter type, by their full names."""
    if names.family not in _MAMBA or peft not in _MAMBA_TYPES:
        return set()
    return {name for name in names.kinds if short(name) in _MAMBA_LAYERS}


def _read_by_kernels(names: Names) -> dict[str, str]:
    """Return the modules whose weight a fused kernel reads in training, each with a reason."""
    norms = (name for name, kind in names.kinds.items() if kind in _FUSED_NORMS)
    found = dict.fromkeys(norms, "a fused kernel reads their weights and epsilon")
    for name, package in direct_reads.by_kernels(names).items():
        found[name] = f"a kernel of {package} reads their weights and does not call them"
    return found


def note(skipped: Collection[str], names: Names, peft: str, target: str) -> str:
    """Return the note on the layers that `all-linear` skips, with their number and reasons; or nothing."""
    if not skipped:
        return ""
    why = reasons(names, peft)
    counts = Counter((_label(name), why[name]) for name in skipped)
    by_reason = dict[str, list[str]]()
    for (label, reason), count in counts.items():
        by_reason.setdefault(reason, []).append(f"{count} {label}")
    listed = "; ".join(f"{', '.join(layers)}: {reason}" for reason, layers in by_reason.items())
    count = f"{len(skipped)} linear layers" if len(skipped) > 1 else "1 linear layer"
    return f"adapter.target_modules: {target} skips {count} on which an adapter would not train ({listed})"


def _label(name: str) -> str:
    """Return the last part of a name that is not a number."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    return parts[-1] if parts else name

"""The targets of `finetune export`, and how each can store the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError, nearest
from finetune.export import compressed_export, gguf_export, mlx_export, ollama_export, vllm_export

if TYPE_CHECKING:
    from finetune.run_folder.run_folder import RunFolder

MODULES: dict[str, Any] = {
    "gguf": gguf_export,
    "ollama": ollama_export,
    "vllm": vllm_export,
    "mlx": mlx_export,
    "compressed-tensors": compressed_export,
}
"""Target -> the module that writes it: `KINDS`, `check(config, kind)` and `write(job, folder)`."""
DEFAULTS = {"gguf": "f16", "ollama": "f16", "vllm": "bf16", "mlx": "bf16", "compressed-tensors": "fp8"}


def check_adapter(folder: RunFolder, to: str, quantize: str | None) -> None:
    """Raise a UserError if the adapter alone can't be exported, or not in this quantization (exit 2)."""
    if quantize is not None and to != "compressed-tensors":
        what, fix = "--quantize does not apply to an adapter alone", "remove --quantize, or remove --adapter"
        why = "finetune exports the adapter's weights as they were trained"
        raise UserError(Problem(what, found=f"--quantize {quantize}", fix=fix, why=why, code="export"))
    if folder.weights != folder.adapter:
        what, fix = "the run has no adapter", "remove --adapter"
        raise UserError(Problem(what, where=str(folder.path), fix=fix, code="export"))
    if not hasattr(MODULES[to], "check_adapter"):
        what, fix = f"--to {to} exports no adapter alone", "remove --adapter"
        raise UserError(Problem(what, fix=fix, code="export"))
    MODULES[to].check_adapter(folder.adapter)


def choose_kind(to: str, quantize: str | None) -> str:
    """Return how the weights are stored.

    Raises:
        UserError: the target does not have this quantization (exit 2).
    """
    kinds = MODULES[to].KINDS
    if quantize is None:
        return DEFAULTS[to]
    if quantize not in kinds:
        near = nearest(quantize, kinds)
        what, fix = f"--to {to} has no such quantization", f"--quantize {near or DEFAULTS[to]}"
        texts = {"found": f"--quantize {quantize}", "expected": ", ".join(kinds), "fix": fix}
        raise UserError(Problem(what, code="export", **texts))
    return quantize

"""The targets of `finetune export`, and how each can store the weights."""

from __future__ import annotations

from typing import Any

from finetune.core.errors import Problem, UserError, nearest
from finetune.export import compressed_export, gguf_export, mlx_export, ollama_export, vllm_export
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
        raise UserError(
            Problem(
                "--quantize does not apply to an adapter alone",
                found=f"--quantize {quantize}",
                fix="remove --quantize, or remove --adapter",
                why="finetune exports the adapter's weights as they were trained",
                code="export",
            )
        )
    if folder.weights != folder.adapter:
        raise UserError(
            Problem("the run has no adapter", where=str(folder.path), fix="remove --adapter", code="export")
        )
    if not hasattr(MODULES[to], "check_adapter"):
        raise UserError(Problem(f"--to {to} exports no adapter alone", fix="remove --adapter", code="export"))
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
        raise UserError(
            Problem(
                f"--to {to} has no such quantization",
                code="export",
                found=f"--quantize {quantize}",
                expected=", ".join(kinds),
                fix=f"--quantize {near or DEFAULTS[to]}",
            )
        )
    return quantize

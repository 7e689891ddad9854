"""`--to mlx`: merged weights in the layout that mlx-lm loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.export import folder_export

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.export.export_job import Job

KINDS = ("bf16", "f32")
FAMILIES = (
    "cohere", "cohere2", "deepseek", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "falcon_h1",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss",
    "granite", "granitemoe", "helium", "llama", "mamba", "mamba2", "mistral", "mixtral", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""Model types that mlx-lm 0.32 has (`mlx_lm/models/`) and that finetune trains. It opens mistral as llama."""


def check(config: Any, _quantize: str) -> None:
    """Raise a UserError if mlx-lm lacks the family (exit 2)."""
    kind = config.get_text_config().model_type
    if kind not in FAMILIES:
        what, expected = "mlx-lm does not have this model family", ", ".join(FAMILIES)
        texts = {"found": f"model_type: {kind}", "expected": expected, "fix": "--to vllm", "code": "export"}
        raise UserError(Problem(what, **texts))


def write(job: Job, folder: Path) -> dict[str, Any]:
    """Write the merged weights, and compare transformers' answers with the fine-tuned model's."""
    report: dict[str, Any] = {"files": folder_export.copy(job.source, folder)}
    report["serving_check"] = folder_export.check(folder, job, job.quantize)
    report["notes"] = ["mlx-lm itself was not run: transformers read the files that mlx-lm reads"]
    return report | {"serve": ["mlx_lm.server --model .", "mlx_lm.chat --model ."]}

"""`finetune export`: write a run or an adapter in the form that a server reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finetune.cli.fast_imports import fast_imports
from finetune.core import argument_types

TARGETS = ("gguf", "ollama", "vllm", "mlx", "compressed-tensors")
SOURCE = (
    "run",
    {
        "metavar": "RUN|ADAPTER",
        "help": "a run folder, a folder of PEFT, or a run or adapter on the Hub: organization/name@revision",
    },
)
EXPORT: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--to",
        {
            "choices": TARGETS,
            "metavar": "SERVER",
            "required": True,
            "help": "what will serve the model: gguf (llama.cpp), ollama, vllm, mlx or "
            "compressed-tensors (vLLM)",
        },
    ),
    (
        "--quantize",
        {
            "metavar": "KIND",
            "help": "how the weights are stored. gguf and ollama: f32, f16 (default), bf16 or q8_0; q6_k, "
            "q5_k_m, q4_k_m, q3_k_m or q2_k with llama.cpp's llama-quantize. vllm and mlx: bf16 (default) or "
            "f32. compressed-tensors: fp8 (default) or int8. For torchao's formats, use `finetune merge`",
        },
    ),
    (
        "--adapter",
        {
            "action": "store_true",
            "help": "export the adapter alone (all targets except ollama). compressed-tensors also writes "
            "the quantized base model",
        },
    ),
    ("--output", {"metavar": "DIR", "help": "a new folder (default: RUN/export-gguf-f16 and so on)"}),
)


def export_model(options: argparse.Namespace) -> dict[str, Any]:
    """Export the model for llama.cpp, Ollama, vLLM or MLX."""
    from finetune.core import progress
    from finetune.core.console import Console, quieten_libraries

    argument_types.check_read("export", options.overrides)
    quieten_libraries()
    with fast_imports(quiet=options.quiet):
        from finetune.export import export_report, exporting
    from finetune.reporting import html_report

    given = {"quantize": options.quantize, "output": options.output, "adapter": options.adapter}
    screen = Console(quiet=options.quiet)
    with progress.phase(screen, "export"):
        report = exporting.run(options.run, options.to, options.overrides, **given)
    export_report.show(screen, report)
    if (Path(options.run) / "report.html").exists():
        html_report.after(Path(options.run), screen)
    return report

"""Give the chat template of a run to a server that loads the adapter on the base model.

Servers take the template from the files of the base model, which can have another one or none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.core import safe_files
from finetune.export import gguf_tokenizer

FILE = "chat_template.jinja"
OPTIONS = {  # first word of a command -> its option
    "llama-server": f"--chat-template-file {FILE}",
    "vllm": f"--chat-template {FILE}",
    "python": f"--chat-template {FILE}",  # of SGLang
    "mlx_lm.server": f'--chat-template "$(cat {FILE})"',  # takes the text
}


def add(folder: Path, tokenizer: Any, ends: list[str], report: dict[str, Any]) -> dict[str, Any]:
    """Write the template next to the adapter, and return the report with commands that use it.

    Args:
        ends: the tokens that end an answer of the run.
    """
    template = gguf_tokenizer.templates(tokenizer).get("tokenizer.chat_template")
    if template is None:
        return report
    if not (folder / FILE).exists():
        safe_files.write_text(folder, FILE, template)
        report["files"] = report["files"] | {FILE: len(template.encode())}
    serve = [f"{line} {OPTIONS[line.split()[0]]}" for line in report["serve"]]
    note = (
        f"the run has another chat template than the base model, so the commands name {FILE}. "
        f"The base model's files must end an answer at {' or '.join(ends)}"
    )
    return report | {"serve": serve, "notes": [*report.get("notes", []), note]}

"""Describe the serving check of an export: on the terminal, in the report and on the model card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.formatting import figure
from finetune.run_folder.file_shapes import ServingCheck

if TYPE_CHECKING:
    from finetune.run_folder.file_shapes import (
        ComparedAnswers,
        ComparedIds,
        ComparedLosses,
        ComparedStops,
        ComparedTemplate,
    )


def title(name: str, report: dict[str, Any]) -> str:
    """Return the target, the quantization and the folder of an export."""
    return f"{report.get('target', '?')}, {report.get('quantize', '?')} ({name})"


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of an export's serving check. Each holds a comparison, or why it was not run."""
    check = ServingCheck.model_validate(report.get("serving_check") or {})
    if not check.reader:
        return [("not run", check.not_run or "")]
    found = [("reader", check.reader)]
    found += [("chat template", _template(check.template))] if check.template else []
    found += [("token ids", _ids(check.token_ids))] if check.token_ids else []
    found += [("stop tokens", _stops(check.stop_tokens))] if check.stop_tokens else []
    found += [("answers", _answers(check.answers))] if check.answers else []
    found += [("loss", _losses(check.loss))] if check.loss else []
    return found


def _template(said: ComparedTemplate) -> str:
    return f"{said.chats} chats, {said.different} differ"


def _ids(said: ComparedIds) -> str:
    if said.not_run:
        return f"not run: {said.not_run}"
    return f"{said.prompts} prompts, {said.different} differ"


def _stops(said: ComparedStops) -> str:
    if said.not_run:
        return f"not run: {said.not_run}"
    return f"missing: {said.missing}" if said.missing else "all present"


def _answers(said: ComparedAnswers) -> str:
    if said.not_run:
        return f"not run: {said.not_run}"
    shift = f"largest difference {said.largest_difference:.2g}, allowed {said.tolerance:.2g}"
    return f"{said.prompts} prompts, {said.tokens} tokens: {shift} (log-prob)"


def _losses(said: ComparedLosses) -> str:
    if said.not_run:
        return f"not run: {said.not_run}"
    both = f"{figure(said.runtime)}, in finetune {figure(said.finetune)}, tolerance {said.tolerance:.2g}"
    return f"{both} (nats per token, {said.tokens:,} tokens)"

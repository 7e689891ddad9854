"""Print the result of a merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.autoconfig import mixed_precision
from finetune.core.formatting import amount, figure

if TYPE_CHECKING:
    from finetune.core.console import Console


def show(screen: Console, report: dict[str, Any]) -> None:
    """Print the result, the verification and the next command."""
    rows, figures, path = report["rows"], report["against_tuned"], report["path"]
    before = f" (was {amount(report['bytes_before'] / 1e6)} MB)" if "bytes_before" in report else ""
    lines = [
        ("weights", f"{report.get('storage', report['dtype'])}"),
        ("folder", path),
        ("size", f"{amount(report['bytes'] / 1e6)} MB{before}"),
    ]
    if "trained_for" in report:
        wanted = "quantized" if report["quantized"] else "not quantized: see --quantize"
        lines += [("trained for", f"{report['trained_for']} ({wanted})")]
    if report.get("merged_onto"):
        storage = report["merged_onto"]
        dequantized = "" if storage in mixed_precision.STORED else ", dequantized"
        lines += [("base model", f"{storage}{dequantized}; merged in fp32")]
    if report["quantized"]:
        left = f"{report['layers']['quantized']} linear layers; not quantized: {report['not_quantized']}"
        lines += [("quantized", left)]
    source = "validation" if rows["from"] == "held-out" else rows["from"]
    lines += [("compared on", f"{rows['rows']:,} {source} examples, {rows['tokens']:,} tokens")]
    screen.table("merge", ("", ""), lines)
    for note in report.get("notes", ()):
        screen.say(f"note: {note}")
    compared = {"fine-tuned model": figures}
    if "against_merged" in report:
        compared["weights before quantization"] = report["against_merged"]
    table = [
        (
            name,
            f"{f['largest']:.2g} of {f['scale']:.3g}",
            f"{f['kl']:.2g}",
            f"{f['same_top']:.2%}",
            f"{100 * f['relative']:.2g}",
        )
        for name, f in compared.items()
    ]
    columns = (
        "compared with",
        "largest logit difference",
        "KL, nats per token",
        "same top token",
        "difference, % of the update",
    )
    screen.table("verification of the saved weights", columns, table)
    if report["scores"]:
        scores = report["scores"].items()
        matched = ["-" if s["exact_match"] is None else f"{s['exact_match']:.1%}" for _, s in scores]
        table = [(name, figure(s["loss"]), share) for (name, s), share in zip(scores, matched, strict=True)]
        screen.table("validation set", ("", "loss", "exact match"), table)
    needs = "transformers and torchao" if report["quantized"] else "transformers"
    screen.say("", f"load the model with {needs}:", f"  AutoModelForCausalLM.from_pretrained({path!r})")

"""Write the model card of a run in the Hub's format: description, usage and results.

It uses only the files that are uploaded with it, so it contains no other information.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from finetune.core import markdown
from finetune.core.formatting import figure
from finetune.core.paths import DATA_SUFFIXES
from finetune.core.visible_text import visible
from finetune.evaluation import verdicts
from finetune.export import vllm_rules
from finetune.export.base_model import Base
from finetune.recipe import adapter_types
from finetune.recipe.schema import Recipe
from finetune.reporting import exports
from finetune.run_folder.run_folder import RunFolder

# Values that --max-lora-rank accepts
# The number of a repeated file name, from `published_text.numbered`
_NUMBER = re.compile(r" \(\d+\)$")
HELD_OUT = {"loss": "validation loss", "exact_match": "exact match", "ended": "ended its answer itself"}
Table = list[tuple[Any, ...]]


def make(
    staged: Path, recipe: Recipe, base: Base, kind: str, repo: str, merge: dict[str, Any] | None = None
) -> ModelCard:
    """Return the model card for the files in `staged`.

    Args:
        kind: adapter | model | merged.
        repo: the repository, or a placeholder.
        merge: the report of `finetune merge` for these weights, if they are merged.
    """
    merge = merge or {}
    name = visible(repo.rpartition("/")[2])
    run = RunFolder(staged)  # an older run can lack some of its files
    config = run.found("adapter_config.json") if kind == "adapter" else {}
    results, report = run.found("eval.json"), run.found("data_report.json")
    of = "" if kind != "merged" else "fine-tuned model" if recipe.adapter.type == "full" else "adapter"
    stored = after_merging(merge)
    data = metadata(recipe, base, kind, name, report, measured(results, of, stored))
    parts = [
        f"# {markdown.plain(name)}",
        summary(recipe, base, kind, report),
        verdict(results.get("verdict", {}), of),
        "## Use",
        usage(recipe, base, kind, repo, config, results.get("settings", {}).get("stops", {})),
        by_torchao(merge),
        "## Results",
        scores_of_stored(stored, of),
        scores(results, report, of),
        *exported(run.found("export.json")),
        "## Training",
        training(run, recipe, report),
        "## Run checks",
        "Each check compares a setting of the recipe with the value in the running system.",
        markdown.table(
            ("option", "expected", "actual", "passed"),
            [
                (r["option"], r["expected"], r["actual"], "yes" if r["passed"] else "NO")
                for r in run.found("checks.json")
            ],
        ),
        "## Versions",
        versions(run),
    ]
    text = "\n\n".join(part for part in parts if part)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


def metadata(
    recipe: Recipe, base: Base, kind: str, name: str, report: dict[str, Any], found: list[EvalResult]
) -> ModelCardData:
    """Return the metadata for the Hub: base model, license, library, datasets and results."""
    adapter = kind == "adapter"
    relation = "adapter" if adapter else "finetune"
    tags = [recipe.adapter.type, "sft", "text-generation", "finetune"]
    if base.on_hub:
        tags.append(f"base_model:{relation}:{base.name}")
    sources = report.get("train", {}).get("sources", {})
    license: dict[str, Any] = dict(base.license)
    return ModelCardData(
        base_model=base.name if base.on_hub else None,
        base_model_relation=relation if base.on_hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        datasets=hub_data(sources) or None,
        tags=tags,
        model_name=name,
        eval_results=found or None,
        **license,
    )


def hub_data(sources: Iterable[str]) -> list[str]:
    """Return the ids of the Hub datasets in `sources`, without the other parts of `hub_name`."""
    hub_sets = [name for name in sources if Path(_NUMBER.sub("", name)).suffix not in DATA_SUFFIXES]
    return list(dict.fromkeys(name.partition(" ")[0] for name in hub_sets))


def after_merging(merge: dict[str, Any]) -> dict[str, Any]:
    """Return the scores `before` and `after` storing the weights again, from merge.json, if there are any."""
    found = merge.get("scores", {})
    after = found.get("quantized") or found.get("merged")
    return {"before": found.get("tuned", {}), "after": after} if after else {}


def measured(results: dict[str, Any], of_merged: str, stored: dict[str, Any]) -> list[EvalResult]:
    """Return the model's results. The name of a result includes the base model's score.

    Args:
        of_merged: the model that was evaluated, if the published weights were made from it.
        stored: scores of the published weights, from `after_merging`.
    """
    found, before = [], f" of the {of_merged} before merging" if of_merged else ""
    for key, title in (("loss", "validation loss, nats per token"), ("exact_match", "exact match")):
        value = results.get("tuned", {}).get(key)
        said = f"{title}{before} ({_beside(results, key)})"
        if stored:
            value = stored["after"].get(key)
            said = f"{title} ({of_merged} before merging {figure(stored['before'].get(key))})"
        if value is not None:
            found.append(_result("validation", "validation set", key, value, said))
    for task, of in results.get("tasks", {}).items():
        metric = of.get("main") or next((m for m in of.get("tuned", {}) if not m.endswith("_stderr")), None)
        value = of.get("tuned", {}).get(metric)
        if value is not None:
            found.append(_result(task, task, str(metric), value, f"{metric}{before} ({_beside(of, metric)})"))
    return found


def _result(data: str, title: str, metric: str, value: float, said: str) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        task_name="Text Generation",
        dataset_type=data,
        dataset_name=title,
        metric_type=metric,
        metric_value=value,
        metric_name=said,
    )


def _beside(results: dict[str, Any], metric: str | None) -> str:
    """Format the base model's score as `base model 1.9, change -1.6 (95% CI -1.7 to -1.5)`."""
    said = f"base model {figure(results.get('base', {}).get(metric))}"
    forgetting = bool(results.get("forgetting"))
    change = interval(results.get("difference", {}).get(metric), str(metric), forgetting=forgetting)
    return f"{said}, change {change}" if change else said


def summary(recipe: Recipe, base: Base, kind: str, report: dict[str, Any]) -> str:
    at = f" at revision `{base.revision}`" if base.revision else ""
    on = f"[{base.name}](https://huggingface.co/{base.name}){at}" if base.on_hub else markdown.code(base.name)
    rows = report.get("train", {}).get("kept")
    method = recipe.adapter.type
    what = {
        "adapter": f"A PEFT adapter ({method}) for {on}",
        "model": f"{on}, all of its weights fine-tuned",
        "merged": f"{on}, all of its weights fine-tuned, then quantized"
        if method == "full"
        else f"{on} with a PEFT adapter ({method}) merged into it",
    }[kind]
    count = f" on {rows:,} examples" if isinstance(rows, int) and rows else ""
    lines = [f"{what}. Trained with supervised fine-tuning{count}."]
    if not base.on_hub:
        lines.append(f"The base model, {markdown.code(base.name)}, is a local folder and not on the Hub.")
        lines += [f"- {markdown.code(file)} sha256 `{digest}`" for file, digest in base.hashes.items()]
    if not base.license_from:
        lines.append(
            "The license of the base model is unknown. Look it up before you use or share this model."
        )
    return "\n".join(lines)


def verdict(said: dict[str, Any], of_merged: str) -> str:
    """Return the verdict of the evaluation with its reasons."""
    before = f"The {of_merged} before the merge: " if of_merged else ""
    if not said.get("why"):
        return ""
    return f"{before}**{markdown.plain(verdicts.title(said))}**: {markdown.plain(str(said.get('why', '')))}"


def usage(
    recipe: Recipe, base: Base, kind: str, repo: str, config: dict[str, Any], stops: dict[str, list[int]]
) -> str:
    """Return code that loads the model with PEFT or Transformers, and a command for vLLM.

    Args:
        stops: token ids that end the answers of the fine-tuned model and of the base model, from eval.json.
    """
    quoted = json.dumps(base.name if base.on_hub else f"path/to/{base.name}")
    at = f", revision={json.dumps(base.revision)}" if base.revision else ""
    if kind != "adapter":
        lines = [f"model = AutoModelForCausalLM.from_pretrained({json.dumps(repo)})"]
        serve = f"vLLM: {markdown.code(f'vllm serve {shlex.quote(repo)}')}"
    else:
        lines = [f"base = AutoModelForCausalLM.from_pretrained({quoted}{at})"]
        if recipe.model.add_tokens:
            lines += ["rows = max(len(tokenizer), len(base.get_input_embeddings().weight))  # may be padded"]
            lines += ["base.resize_token_embeddings(rows)  # this run added tokens"]
        lines += [f"model = PeftModel.from_pretrained(base, {json.dumps(repo)})"]
        if stops and stops["answers"] != stops["model"]:
            why = f"  # end of an answer; the base model has {stops['model']}"
            lines += [f"model.generation_config.eos_token_id = {stops['answers']}{why}"]
        serve = vllm(config, base, repo)
    head = ["from peft import PeftModel"] if kind == "adapter" else []
    head += [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(repo)})",
    ]
    stored = adapter_types.find(recipe.adapter.type).storage or recipe.model.quantization
    note = f"In training, the base model was stored in {stored}." if stored not in ("auto", "none") else ""
    code = "\n".join(["```python", *head, *lines, "```"])
    return "\n\n".join(part for part in (code, note if kind == "adapter" else "", serve) if part)


def by_torchao(merge: dict[str, Any]) -> str:
    """Return the packages that quantized weights need."""
    if not merge.get("quantized"):
        return ""
    how = markdown.plain(merge.get("storage", merge["quantized"]))
    return f"torchao quantized the weights ({how}). To load them, also run `pip install torchao`."


def vllm(config: dict[str, Any], base: Base, repo: str) -> str:
    """Return the command that serves the adapter, or why vLLM cannot serve it and an alternative."""
    parameters = sorted(config.get("target_parameters") or ())
    stacked = bool(parameters) and all("experts." in name for name in parameters)
    refusals = vllm_rules.refusals(config)
    why, rank = ", ".join(refusals), vllm_rules.largest_rank(config)
    if why:
        way = "Merge the adapter first: `finetune merge RUN`, then `finetune publish RUN --merged`."
        if unmerged := adapter_types.unmerged(str(config.get("peft_type")).lower(), config):
            way = f"Use the adapter with PEFT, which {unmerged}."
        only = len(refusals) == 1 and stacked
        except_for = ", except for gpt-oss, Qwen3.5-MoE and other models whose class in vLLM has "
        except_for = f"{except_for}`is_3d_moe_weight`" if only else ""
        return f"vLLM can't serve {why} as an adapter{except_for}. {way}"
    name = repo.rpartition("/")[2]
    words = [
        "vllm",
        "serve",
        base.name if base.on_hub else f"path/to/{base.name}",
        "--enable-lora",
        "--max-lora-rank",
        str(rank),
        "--lora-modules",
        f"{name}={repo}",
    ]
    return "vLLM:\n\n" + markdown.block(f"{visible(shlex.join(words))}\n", "sh")


def scores_of_stored(stored: dict[str, Any], of_merged: str) -> str:
    """Return a table that compares the published weights with the weights that they were made from."""
    if not stored:
        return ""
    before, after = stored["before"], stored["after"]
    rows = [(title, figure(before.get(key)), figure(after.get(key))) for key, title in HELD_OUT.items()]
    return "These weights on the validation set:\n\n" + markdown.table(
        ("", f"{of_merged} before the merge", "these weights"), rows
    )


def scores(results: dict[str, Any], report: dict[str, Any], of_merged: str) -> str:
    """Return a table of base model and fine-tuned model, with intervals of the differences."""
    rows: Table = []
    base, tuned = results.get("base", {}), results.get("tuned", {})
    for key, title in HELD_OUT.items():
        if tuned.get(key) is not None:
            difference = interval(results.get("difference", {}).get(key), key)
            rows.append((title, figure(base.get(key)), figure(tuned[key]), difference))
    for task, of in results.get("tasks", {}).items():
        for metric, value in of.get("tuned", {}).items():
            if not metric.endswith("_stderr"):
                before, difference = of.get("base", {}).get(metric), of.get("difference", {}).get(metric)
                change = interval(difference, metric, forgetting=bool(of.get("forgetting")))
                rows.append((f"{task}: {metric}", figure(before), figure(value), change))
    if not rows:
        return "The run has no validation set and no scores."
    settings = results.get("settings", {})
    held_out = settings.get("rows", report.get("validation", {}).get("kept", 0))
    said = [f"Scores of the base model and the {of_merged} before the merge."] if of_merged else []
    said += [f"On {held_out} validation examples, with greedy search."] if held_out else []
    said += [f"Note: {markdown.plain(note)}." for note in settings.get("notes", [])]
    columns = ("", "base model", of_merged or "fine-tuned model", "change (95% CI)")
    return "\n\n".join([*filter(None, [" ".join(said)]), markdown.table(columns, rows), verdicts.LEGEND])


def exported(reports: dict[str, Any]) -> list[str]:
    """Return a section with the serving check of each export, or nothing if there is none."""
    if not reports:
        return []
    parts = ["## Exports", "A program that is not part of finetune read each exported model."]
    for name, report in reports.items():
        parts.append(f"### {markdown.plain(exports.title(name, report))}")
        parts.append(markdown.table(("", ""), exports.lines(report)))
    return parts


def training(run: RunFolder, recipe: Recipe, report: dict[str, Any]) -> str:
    """Return the data, the main training settings and the whole recipe."""
    train = report.get("train", {})
    rows: Table = [
        (f"data {markdown.code(name)}", digest) for name, digest in train.get("sources", {}).items()
    ]
    rows += [("examples", f"{train.get('kept')} of {train.get('rows')}")] if train else []
    tokens = f"{train.get('trained_tokens', 0):,} of {train.get('tokens', 0):,}"
    rows += [("tokens that contribute to the loss", tokens)]
    rows += [(key, f"{value}") for key, value in recipe.adapter.options().items()]
    section = recipe.train
    rows += [
        ("learning rate", f"{section.learning_rate:g}"),
        ("effective batch size", section.effective_batch_size),
    ]
    if steps := run.steps():
        rows += [("steps", steps[-1].get("step"))]
        rows += [("last training loss", figure(last))] if (last := steps[-1].get("loss")) else []
    machine = run.found("environment.json").get("hardware", {})
    rows += [("machine", f"{machine.get('count', 1)} x {machine['name']}")] if "name" in machine else []
    text = run.recipe.read_text(encoding="utf-8")
    whole = f"<details><summary>The recipe</summary>\n\n{markdown.block(text, 'yaml')}\n\n</details>"
    return f"{markdown.table(('', ''), rows)}\n\n{whole}"


def versions(run: RunFolder) -> str:
    found = run.found("environment.json")
    packages = {"python": found.get("python"), **found.get("packages", {})}
    return markdown.table(("package", "version"), [(name, text) for name, text in packages.items() if text])


def interval(change: object, metric: str, *, forgetting: bool = False) -> str:
    """Format a change as `-1.6 (95% CI -1.7 to -1.5) better`."""
    if not isinstance(change, dict):
        return ""
    value, low, high = (figure(change.get(part)) for part in ("value", "low", "high"))
    word = verdicts.shown_word(change, metric, forgetting=forgetting)
    return f"{value} (95% CI {low} to {high}) {word}".strip()

"""Evaluation: its speed against lm-eval's own command, and a real model on real data. Verdicts: verdicts.py.

    python benchmarks/evaluation.py ASSETS [--part speed real] [--limit N]

speed     base and tuned on three multiple-choice sets: `finetune evaluate` once, `lm_eval run` twice
real      books-16m tuned on SMS spam and on commonsense questions, evaluated on the part held out

ASSETS holds books-16m/, ci-sms/ and commonsense/ (a pre-trained LLaMA of 15.7 M parameters, and two sets).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from finetune.evaluation import verdicts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "evaluation.json"
SETS = {
    "arc_easy": "ARC-Easy_train",
    "arc_challenge": "ARC-Challenge_train",
    "openbookqa": "openbookqa_train",
}
HELD_OUT = 5  # every fifth commonsense row is not trained on


def command(*arguments: str) -> None:
    """One `finetune` command in this process; its failure ends the benchmark."""
    from finetune.cli import main as cli_main

    print("finetune", *arguments, flush=True)
    if code := cli_main.main([*arguments, "--quiet"]):
        sys.exit(f"exit {code}")


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "eval.json").read_text(encoding="utf-8"))


def choices(instruction: str) -> tuple[str, list[str]]:
    """The question and the answers of an instruction of LLM-Adapters."""
    asked, _, rest = instruction.partition("\n\nAnswer1: ")
    listed = re.split(r" Answer\d: ", rest.partition("\n\nAnswer format")[0])
    return asked.partition("question: ")[2], listed


def commonsense(assets: Path, folder: Path) -> tuple[Path, dict[str, list[Any]]]:
    """Rows to train on, and those held out by set."""
    training, held = [], {}
    for name, file in SETS.items():
        rows = json.loads((assets / "commonsense" / f"{file}.json").read_text(encoding="utf-8"))
        held[name] = rows[::HELD_OUT]
        training += [row for index, row in enumerate(rows) if index % HELD_OUT]
    random.Random(0).shuffle(training)
    return write_rows(folder / "commonsense.jsonl", training), held


def recipe(folder: Path, name: str, text: str) -> Path:
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{name}.yaml"


def train_commonsense(assets: Path, folder: Path) -> tuple[Path, dict[str, list[Any]]]:
    training, held = commonsense(assets, folder)
    path = recipe(
        folder,
        "commonsense",
        f"""model: {{name: {assets / "books-16m"}}}
data: {{name: {training}, validation_fraction: 0.02, max_length: 512}}
adapter: {{type: lora, r: 32, lora_alpha: 64, target_modules: all-linear}}
train: {{learning_rate: 2e-3, effective_batch_size: 32, num_train_epochs: 3, warmup_steps: 20}}
eval: {{samples: 2}}
""",
    )
    run = folder / "run-commonsense"
    command("train", str(path), f"train.output_dir={run}")
    return run, held


def large_model(folder: Path) -> Path:
    """The 1.1 B shape of TinyLlama with random weights, and the quickstart's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny_llama" / "model")
    shape = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    made.save_pretrained(folder / "1b")
    tokenizer.save_pretrained(folder / "1b")
    return folder / "1b"


def speed(assets: Path, folder: Path, base: Path, limit: int | None) -> dict[str, Any]:
    """The same rows, prompts and batch size for both commands; wall time with imports and loading."""
    run = folder / "run-speed"
    short = ["train.max_steps=4", "train.warmup_steps=0", "data.validation=null", "eval.forgetting=false"]
    asked = [f"model.name={base}", f"train.output_dir={run}", "train.learning_rate=1e-4", *short]
    command("train", str(ROOT / "recipes" / "quickstart.yaml"), *asked)
    ours, theirs, questions = [], folder / "theirs", 0
    theirs.mkdir()
    for name, file in SETS.items():
        rows = json.loads((assets / "commonsense" / f"{file}.json").read_text(encoding="utf-8"))[:limit]
        asked = [(*choices(row["instruction"]), int(row["answer"][-1]) - 1) for row in rows]
        listed = [{"question": q, "options": options, "right": right} for q, options, right in asked]
        data = write_rows(folder / f"{name}.jsonl", listed)
        questions += len(listed)
        common = 'Question: {{ question }}\\nAnswer:"\n'
        ours.append(folder / f"{name}_choice.yaml")
        ours[-1].write_text(
            f'data: {data.name}\nkind: multiple_choice\nprompt: "{common}choices: "{{{{ options }}}}"\n'
            'answer: "{{ right }}"\n'
        )
        (theirs / f"{name}.yaml").write_text(
            f"task: {name}_choice\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{common}'
            'doc_to_choice: "{{ options }}"\ndoc_to_target: "{{ right }}"\n'
            "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
        )
    dtype = "float32" if device() == "CPU" else "bfloat16"  # as `finetune` loads it there
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    started = time.perf_counter()
    own = [sys.executable, "-m", "finetune", "evaluate", str(run), "--tasks", *map(str, ours)]
    own += ["eval.batch_size=64", "--quiet"]
    subprocess.run(own, check=True, env=environment)
    seconds = {"finetune": time.perf_counter() - started}
    accuracy: dict[str, dict[str, list[float]]] = {"finetune": {}, "lm_eval": {}}
    for name, task in read(run)["tasks"].items():
        if name.endswith("_choice"):
            accuracy["finetune"][name] = [task["base"]["acc"], task["tuned"]["acc"]]
    started = time.perf_counter()
    for which in ("", f",peft={run / 'adapter'}"):
        names = ",".join(f"{name}_choice" for name in SETS)
        asked = f"pretrained={base},dtype={dtype},tokenizer={run / 'adapter'}{which}"
        target = folder / f"lm_eval{bool(which)}"
        line = [
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            "--model",
            "hf",
            "--model_args",
            asked,
            "--tasks",
            names,
        ]
        line += ["--include_path", str(theirs), "--batch_size", "64", "--output_path", str(target)]
        subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)
        (results,) = target.rglob("results*.json")
        for name, found in json.loads(results.read_text())["results"].items():
            accuracy["lm_eval"].setdefault(name, []).append(found["acc,none"])
    seconds["lm_eval"] = time.perf_counter() - started
    rates = {name: 2 * questions / taken for name, taken in seconds.items()}
    found = {"model": base.name, "questions": questions, "seconds": seconds}
    return {**found, "samples_per_second": rates, "accuracy": accuracy}


def real(assets: Path, folder: Path, run: Path, held: dict[str, list[Any]]) -> dict[str, Any]:
    """Base against tuned on what was held out: the paper's answer extraction, SMS spam, and forgetting."""
    named = []
    for name, rows in held.items():
        shipped = (ROOT / "examples" / "commonsense" / f"{name}.yaml").read_text(encoding="utf-8")
        data = write_rows(folder / f"held_{name}.jsonl", rows)
        named.append(folder / f"commonsense_{name}.yaml")
        named[-1].write_text(re.sub(r"(?m)^data: \S+", f"data: {data.name}", shipped), encoding="utf-8")
    knowledge = str(ROOT / "examples" / "general" / "knowledge.yaml")
    command("evaluate", str(run), "--tasks", *map(str, named), knowledge)
    sms = recipe(
        folder,
        "sms",
        f"""model: {{name: {assets / "books-16m"}}}
data:
  name: {assets / "ci-sms" / "train.jsonl"}
  validation: {assets / "ci-sms" / "test.jsonl"}
  max_length: 512
adapter: {{type: lora, r: 16, lora_alpha: 32, target_modules: all-linear}}
train: {{learning_rate: 2e-3, effective_batch_size: 32, max_steps: 170, warmup_steps: 10}}
eval: {{eval_steps: 17, samples: 3, tasks: [{knowledge}]}}
""",
    )
    command("train", str(sms), f"train.output_dir={folder / 'run-sms'}")
    kept = ("base", "tuned", "difference", "verdict", "tasks", "samples")
    return {
        name: {key: read(path)[key] for key in kept}
        for name, path in (("commonsense", run), ("sms", folder / "run-sms"))
    }


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("assets", nargs="?", type=Path)
    parser.add_argument("--part", nargs="+", default=["speed", "real"])
    parser.add_argument("--limit", type=int, help="questions of each set in the speed part")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; default: a temporary one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="finetune-evaluation-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.results.read_text()) if options.results.exists() else {}

    def note(part: str, found: dict[str, Any]) -> None:
        results[part] = {"device": device(), **found}
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if "speed" in options.part:
        large = device() != "CPU"
        base = large_model(folder) if large else ROOT / "examples" / "tiny_llama" / "model"
        part = f"speed, {'1.1 B' if large else '5.5 M'}"
        note(part, speed(options.assets.resolve(), folder, base, options.limit))
    if "real" in options.part:
        note(
            "real",
            real(options.assets.resolve(), folder, *train_commonsense(options.assets.resolve(), folder)),
        )
    if not options.keep:
        shutil.rmtree(folder)


def real_table(results: dict[str, Any]) -> str:
    """Base against tuned of a real model on two real sets, with what it forgot."""
    head = [
        "| trained on | asked | examples | base model | fine-tuned model | change (95% CI) | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = []
    for name, title in (("sms", "SMS spam"), ("commonsense", "commonsense")):
        found = results["real"][name]
        rows = (
            [("validation loss", "loss", found), ("exact match", "exact_match", found)]
            if found["base"]
            else []
        )
        rows += [
            (verdicts.titled(f"{task} {one['main']}"), one["main"], one)
            for task, one in found["tasks"].items()
        ]
        for asked, key, one in rows:
            if asked.endswith("_choice acc"):
                continue  # of the speed part
            form = "{:.3f}" if key == "loss" else "{:.1%}"
            change = one["difference"][key]
            base, tuned, value, low, high = (
                form.format(number)
                for number in (
                    one["base"][key],
                    one["tuned"][key],
                    *(change[x] for x in ("value", "low", "high")),
                )
            )
            better = (one.get("higher_is_better") or {}).get(
                key
            )  # this file is older than the key in `change`
            forgetting = bool(one.get("forgetting"))
            word = verdicts.shown_word(change | {"higher_is_better": better}, key, forgetting=forgetting)
            said = f"{value} ({low} to {high}) | {word}"
            lines.append(f"| {title} | {asked} | {change['rows']} | {base} | {tuned} | {said} |")
    return "\n".join([*head, *lines])


def speed_table(results: dict[str, Any]) -> str:
    """Both commands on the same questions."""
    lines = ["| model | device | questions | command | wall time | samples/s |", "|---|---|---|---|---|---|"]
    for part in (part for name, part in results.items() if name.startswith("speed")):
        for name, taken in part["seconds"].items():
            rate = part["samples_per_second"][name]
            how = "`finetune evaluate`, once" if name == "finetune" else "`lm_eval run`, twice"
            where = f"| {part['model']} | {part['device']} | {part['questions']:,}"
            lines.append(f"{where} | {how} | {taken:.0f} s | {rate:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

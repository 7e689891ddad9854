"""Compare the losses of quantized base models with the losses of bf16, on a real model and real text.

    python benchmarks/loss_parity.py --assets FOLDER [--data questions,books]    # needs a GPU with fp8 GEMMs
    python benchmarks/loss_parity.py --assets FOLDER --bases fp8,fp8-int8        # MLPs stored in int8
    python benchmarks/loss_parity.py --assets FOLDER --bases bf16,fp8-head       # and the output head in fp8
    python benchmarks/loss_parity.py --assets FOLDER --data experts --bases bf16,fp8,nf4-experts --steps 100

FOLDER holds books-16m, a LLaMA of 15.7 M parameters that was pre-trained on books, and two sets of data. The
model has never seen gsm8k (`questions`: school mathematics). It knows text like text-books (`books`).
`experts` trains on the questions, too. Its base model is a mixture of experts of 17 M parameters (Qwen3-MoE),
which the script first trains on text-books. `nf4-experts` has `speed.fp8_experts: true`.

Each run is `finetune train` with the same seed: LoRA r=16 on all linear layers and on experts, and 16
examples of at most 512 tokens for each step. Every twentieth example is held out, at most 200. Their loss
is computed every 25 steps, and at the end with the saved adapter. This loss must be within 0.5% of the loss
of bf16. For `experts`, the mean of the last ten training losses must be within 0.5%, too. The curves go
into loss_parity.json and loss_parity-DATA.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("loss_parity.json")
ALLOWED = 0.005  # relative difference of the validation losses at the end
HELD_OUT = 20  # every so many'th row
ROW_CHARACTERS = 1500  # of a book, cut between its paragraphs: less than 512 tokens
MOST_HELD_OUT = 200  # rows
RECIPE = """
model: {{name: {model}, quantization: {quantization}}}
data: {{name: {train}, validation: {held_out}, max_length: 512, train_on: {train_on}, too_long: drop}}
adapter: {{type: lora, r: 16, lora_alpha: 32, target_modules: {targets}}}
speed: {{activation_checkpointing: {checkpointing}, loss: {loss}, fp8_experts: {fp8_experts}}}
train: {{max_steps: {steps}, effective_batch_size: 16, per_device_train_batch_size: 16, learning_rate: 1.0e-3,
  warmup_steps: 10, lr_scheduler_type: cosine, logging_steps: 1, seed: 42, output_dir: {folder}}}
eval: {{forgetting: false, generate: false, samples: 0, eval_steps: {every}, load_best_model_at_end: false}}
"""
EXPERTS = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "intermediate_size": 1024, "vocab_size": 8192, "max_position_embeddings": 512, "norm_topk_prob": True,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
PRETRAIN = """
model: {{name: {model}}}
data: {{name: {train}, max_length: 512, train_on: all, packing: true}}
adapter: {{type: full}}
train: {{max_steps: 500, effective_batch_size: 32, learning_rate: 1.0e-3, warmup_steps: 20, seed: 42,
  lr_scheduler_type: cosine, output_dir: {folder}}}
eval: {{forgetting: false, generate: false, samples: 0}}
"""
LAST = 10  # training losses whose mean is compared for experts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--data", default="questions")
    parser.add_argument("--bases", default="bf16,fp8", help="the first is what the others are held against")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="where JSON and curves go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.data.split(","):
        with tempfile.TemporaryDirectory() as folder:
            files = write_data(name, options.assets, Path(folder))
            files |= base_model(name, options.assets, Path(folder))
            runs = {base: train(base, files, options, Path(folder)) for base in options.bases.split(",")}
        results[name] = compared(runs, of_training=name == "experts")
        (options.out / "loss_parity.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.out / f"loss_parity-{name}.svg").write_text(drawn(results[name]))
    print(table(results))
    if not all(result["within"] for result in results.values()):
        sys.exit(f"a validation loss is further than {ALLOWED:.1%} from the first base's")


def write_data(name: str, assets: Path, folder: Path) -> dict[str, Any]:
    """Rows to train on and rows held out, as files; and which tokens carry loss."""
    if name != "books":
        rows = [json.loads(line) for line in (assets / "gsm8k" / "train.jsonl").read_text().splitlines()]
        rows = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    else:
        rows = [{"text": text} for text in passages((assets / "text-books" / "val.txt").read_text())]
    held_out = rows[::HELD_OUT][:MOST_HELD_OUT]
    trained = [row for index, row in enumerate(rows) if index % HELD_OUT]
    for file, part in (("train", trained), ("held_out", held_out)):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}-{file}.jsonl").write_text(lines)
    paths = {file: folder / f"{name}-{file}.jsonl" for file in ("train", "held_out")}
    return {**paths, "train_on": "all" if name == "books" else "assistant"}


def base_model(name: str, assets: Path, folder: Path) -> dict[str, Any]:
    """Return the folder of the base model, and the modules to adapt. Train a mixture of experts first."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    from finetune.cli import main as cli_main

    if name != "experts":
        return {"model": assets / "books-16m", "targets": "all-linear"}
    set_seed(0)
    model = folder / "experts"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **EXPERTS)).save_pretrained(model)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(assets / "books-16m" / file, model / file)
    rows = passages((assets / "text-books" / "val.txt").read_text())
    (folder / "pretrain.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (folder / "pretrain.yaml").write_text(
        PRETRAIN.format(model=model, train=folder / "pretrain.jsonl", folder=folder / "pretrained")
    )
    if code := cli_main.main(["train", str(folder / "pretrain.yaml"), "--quiet"]):
        sys.exit(f"pre-training: exit {code}")
    return {"model": folder / "pretrained" / "model", "targets": "all-linear-and-experts"}


def passages(text: str) -> list[str]:
    """Books in pieces of whole paragraphs."""
    pieces = [""]
    for paragraph in text.replace("<|endoftext|>", "\n\n").split("\n\n"):
        if len(pieces[-1]) + len(paragraph) > ROW_CHARACTERS:
            pieces.append("")
        pieces[-1] = f"{pieces[-1]}\n\n{paragraph[:ROW_CHARACTERS]}".strip()
    return [piece for piece in pieces if piece]


def train(base: str, files: dict[str, Any], options: Any, folder: Path, *changes: str) -> dict[str, Any]:
    """Return the losses of one run: of each step, of the validation set, and of the saved weights."""
    import torch

    from finetune.cli import main as cli_main

    run, recipe = folder / base, folder / f"{base}.yaml"
    shutil.rmtree(run, ignore_errors=True)
    settings = {"steps": options.steps, "every": options.every}
    stored, _, kind = base.partition("-")
    head, experts = kind == "head", kind == "experts"
    settings |= {"quantization": {"bf16": "none"}.get(stored, stored)}
    settings |= {
        "loss": "chunked_fp8" if head else "auto",
        "fp8_experts": "true" if experts else "auto",
        "checkpointing": "auto" if head or experts else kind or "auto",
    }
    recipe.write_text(RECIPE.format(folder=run, **settings, **files))
    if code := cli_main.main(["train", str(recipe), *changes, "--quiet"]):
        sys.exit(f"{base}: exit {code}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((run / "eval.json").read_text())
    run_checks = json.loads((run / "checks.json").read_text())
    stored = [one["actual"] for one in run_checks if one["option"] in ("model.quantization", "fp8 GEMMs")]
    return {
        "training": [[line["step"], line["loss"]] for line in lines if "loss" in line],
        "held_out": [[line["step"], line["eval_loss"]] for line in lines if "eval_loss" in line],
        "before": found["base"]["loss"],
        "after": found["tuned"]["loss"],
        "receipts": stored,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def compared(runs: dict[str, dict[str, Any]], *, of_training: bool = False) -> dict[str, Any]:
    """Return the runs with the relative differences of their last losses from the first run's.

    Args:
        of_training: whether the last training losses must be close, too.
    """
    first = next(iter(runs.values()))
    apart = {base: run["after"] / first["after"] - 1 for base, run in runs.items()}
    trained = {base: last(run) / last(first) - 1 for base, run in runs.items()}
    held = [*apart.values(), *(trained.values() if of_training else ())]
    return {
        "runs": runs,
        "apart": apart,
        "apart_in_training": trained,
        "within": all(abs(value) <= ALLOWED for value in held),
    }


def last(run: dict[str, Any]) -> float:
    """Return the mean of the last training losses."""
    losses = [loss for _, loss in run["training"][-LAST:]]
    return sum(losses) / len(losses)


def drawn(result: dict[str, Any]) -> str:
    """Return the curves of the training loss and the validation loss as an SVG."""
    from finetune.reporting.plots import Curve, curves, smoothed

    lines = []
    for base, run in result["runs"].items():
        for kind, style in (("training", "line"), ("held_out", "points")):
            x, y = map(list, zip(*run[kind], strict=True))
            y = smoothed(y) if kind == "training" else y
            lines.append(Curve(f"{base}, {kind.replace('_', ' ')}", x, y, style))
    return curves(lines, "loss")


def table(results: dict[str, dict[str, Any]]) -> str:
    """Validation loss of base and tuned, by base, as a markdown table."""
    lines = [
        "| data | base | validation loss: before | after | relative to the first | last 20 training losses "
        "| GPU, torch, date |",
        "|---|---|" + "---|" * 5,
    ]
    for name, result in results.items():
        for base, run in result["runs"].items():
            last = [loss for _, loss in run["training"][-20:]]
            where = f"{run['device']}, {run['torch'].partition('+')[0]}, {run['date']}"
            lines.append(
                f"| {name} | {base} | {run['before']:.4f} | {run['after']:.4f} "
                f"| {result['apart'][base]:+.2%} | {sum(last) / len(last):.4f} | {where} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()

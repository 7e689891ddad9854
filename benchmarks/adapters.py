"""Measure the quality of each adapter type on two small tasks, and its time and memory on a larger model.

    python benchmarks/adapters.py                      # all parts -> benchmarks/adapters.json
    python benchmarks/adapters.py --part rates         # the search for the learning rate of each type
    python benchmarks/adapters.py --part quality       # three seeds of each type, at the best rate
    python benchmarks/adapters.py --part shape         # seconds a step and peak memory, one run at a time
    python benchmarks/adapters.py --types lora dora --seeds 1 --jobs 16

Each cell is one `finetune train` in this process. It uses `recipes/adapters/TYPE.yaml` if that exists, and
otherwise `recipes/quickstart.yaml` with `adapter.type=TYPE`. The script writes the JSON file after each cell.
It does not run a cell again that the file already has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from adapter_tables import SHAPES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "adapters.json"
ASSETS = Path(os.environ.get("FINETUNE_TEST_ASSETS", ROOT.parent / "shared" / "assets"))

# The search starts at a quarter of this rate, the rate itself and four times the rate. It continues beyond
# the best end.
FIRST_RATES = {
    "lora": 4e-3,
    "rslora": 1e-3,
    "dora": 4e-3,
    "adalora": 2e-2,
    "ia3": 1e-1,
    "oft": 4e-3,
    "boft": 4e-3,
    "vera": 2e-2,
    "lokr": 4e-3,
    "loha": 4e-3,
    "hira": 4e-3,
    "miss": 4e-3,
    "randlora": 4e-3,
    "fourierft": 5e-2,
    "road": 2e-2,
    "prompt_tuning": 1e-1,
    "full": 5e-4,
}
SAME_RATE = {
    "qlora": "lora",
    "qdora": "dora",
    "qadalora": "adalora",
}  # as the type on a base in full precision
TYPES = [*FIRST_RATES, *SAME_RATE]
FACTOR, MOST_RATES, SEARCH_SEED = 4, 6, 7
SEEDS = (1, 2, 3, 4, 5, 6)

# One process of several on a GPU: no loader processes of its own.
NO_LOADERS = [
    "train.dataloader_num_workers=0",
    "train.dataloader_prefetch_factor=null",
    "train.dataloader_persistent_workers=false",
]
TASKS: dict[str, list[str]] = {
    "json": [],
    "sms": [
        f"model.name={ASSETS / 'stories260K-eos-hf'}",
        f"data.name={ASSETS / 'ci-sms' / 'train.jsonl'}",
        f"data.validation={ASSETS / 'ci-sms' / 'test.jsonl'}",
        "train.effective_batch_size=32",
        "train.per_device_train_batch_size=32",
        "train.max_steps=170",
    ],
}
# Widths of 64, 172 and 32 are no multiples of these types' usual blocks.
NARROW = {
    "oft": ["adapter.oft_block_size=4"],
    "miss": ["adapter.r=4"],
    "road": ["adapter.group_size=4"],
}
SHAPE_STEPS, SHAPE_WARM_UP, SHAPE_LENGTH = 15, 5, 1024


class Cell(NamedTuple):
    """One run. Its fields identify it and are in its row."""

    part: str
    task: str
    type: str
    learning_rate: float
    seed: int


def wanted(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[Cell]:
    """The cells that can be run, given what is known."""
    cells = []
    for kind in options.types:
        for task in options.tasks:
            searched = SAME_RATE.get(kind, kind)
            found = {row["learning_rate"]: loss(row) for row in rows if is_search(row, task, searched)}
            more = next_rates(found, FIRST_RATES[searched])
            if "rates" in options.part:
                cells += [Cell("rates", task, searched, rate, SEARCH_SEED) for rate in more]
            if "quality" in options.part and found and not more:
                best = min(found, key=lambda rate: found[rate])
                cells += [Cell("quality", task, kind, best, seed) for seed in SEEDS[: options.seeds]]
        if "shape" in options.part:
            cells += [Cell("shape", task, kind, 1e-4, 1) for task in SHAPES]
    known = {tuple(row[name] for name in Cell._fields) for row in rows}
    return [cell for cell in dict.fromkeys(cells) if cell not in known]


def next_rates(found: dict[float, float], first: float) -> list[float]:
    """The rates to try next: the three first, then beyond an end that is the best, up to `MOST_RATES`."""
    start = [rounded(first * factor) for factor in (1 / FACTOR, 1, FACTOR)]
    missing = [rate for rate in start if rate not in found]
    if missing or len(found) >= MOST_RATES:
        return missing
    best = min(found, key=lambda rate: found[rate])
    beyond = {min(found): best / FACTOR, max(found): best * FACTOR}
    return [rounded(beyond[best])] if best in beyond else []


def rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def is_search(row: dict[str, Any], task: str, kind: str) -> bool:
    return (row["part"], row["task"], row["type"]) == ("rates", task, kind)


def loss(row: dict[str, Any]) -> float:
    """Return the value that the search compares. A failed run is the worst."""
    return row["tuned"]["loss"] if "tuned" in row else math.inf


def overrides(cell: Cell, large: Path | None) -> list[str]:
    """Return the overrides of the cell."""
    given = [f"train.learning_rate={cell.learning_rate}", f"train.seed={cell.seed}"]
    if cell.part == "shape":
        given += [f"model.name={large}/model", f"data.name={large}/rows.jsonl", "data.validation=null"]
        given += [
            f"data.max_length={SHAPE_LENGTH}",
            "speed.activation_checkpointing=none",
            "train.warmup_steps=0",
        ]
        given.append("speed.fused=false")  # every type by PEFT's own forward
        rows = SHAPES[cell.task]
        given += [f"train.effective_batch_size={rows}", f"train.per_device_train_batch_size={rows}"]
        return [*given, f"train.max_steps={SHAPE_STEPS}"]
    given += [*TASKS[cell.task], *NO_LOADERS, "eval.samples=0"]
    given += NARROW.get(cell.type, []) if cell.task == "sms" else []
    if cell.part == "rates":  # a tenth of the training rows decides; the test rows are not looked at
        given += ["data.validation=null", "data.validation_fraction=0.1", "eval.max_new_tokens=1"]
    return given


def run(cell: Cell, large: Path | None, short: list[str]) -> dict[str, Any]:
    """Train one cell by the command, in this process; an error is a result too."""
    import torch

    from finetune.cli import main as cli_main

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    own = ROOT / "recipes" / "adapters" / f"{cell.type}.yaml"
    recipe = [str(own)] if own.exists() else [f"{ROOT}/recipes/quickstart.yaml", f"adapter.type={cell.type}"]
    said = io.StringIO()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        command = ["train", *recipe, *overrides(cell, large), *short, f"train.output_dir={place}", "--quiet"]
        try:
            with contextlib.redirect_stderr(said):
                code = cli_main.main(command)
        except Exception as error:  # a bug of finetune or of a library; the row has the message
            code = f"{type(error).__name__}: {error}"
        row = cell._asdict() | ({"overrides": short} if short else {})
        if code == 0:
            return row | read(place, timed=cell.part == "shape")
        text = said.getvalue().strip().replace(folder, "") if code in (2, 3, 4, 5) else code
        for path in (ASSETS, ROOT):
            text = str(text).replace(f"{path}/", "")
        return row | {"error": " ".join(text.split())[:300]}


def read(place: Path, timed: bool) -> dict[str, Any]:
    """Return size and quality from a run folder, and time and memory if it ran alone."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    scores = json.loads((place / "eval.json").read_text())
    environment = json.loads((place / "environment.json").read_text())
    got = {check["option"]: check["actual"] for check in json.loads((place / "checks.json").read_text())}
    seconds = [line["step_seconds"] for line in lines[SHAPE_WARM_UP:]] or [lines[-1]["step_seconds"]]
    memory = {"step_seconds": statistics.median(seconds), "gpu_memory_gib": lines[-1]["gpu_memory_gib"]}
    packages = ("torch", "transformers", "trl", "peft", "bitsandbytes")
    quality = {"base": scores["base"], "tuned": scores["tuned"]} if scores["tuned"] else {}
    return {
        "steps": lines[-1]["step"],
        "tokens_per_step": lines[-1]["tokens"] / lines[-1]["step"],
        "train_loss": lines[-1]["loss"],
        "trainable": int(got["trainable parameters"].split(" of ")[0].replace(",", "")),
        "saved_bytes": sum(path.stat().st_size for path in place.glob("*/*model*.safetensors")),
        "device": environment["hardware"]["name"],
        "versions": {name: environment["packages"].get(name) for name in packages},
        **(memory if timed else {}),
        **quality,
    }


def make_large(folder: Path) -> None:
    """A Llama of the layers of Llama 3.2 1B, eighteen of them, with random weights and the embedded model's
    tokenizer, and rows of nearly `SHAPE_LENGTH` tokens: chats of the embedded task, one after the other."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = ROOT / "examples" / "tiny_llama"
    tokenizer = AutoTokenizer.from_pretrained(source / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=18,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows: list[list[dict[str, str]]] = [[]]
    used = 0
    for line in (source / "data" / "train.jsonl").read_text().splitlines():
        chat = json.loads(line)["messages"]
        length = len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])
        if used + length > SHAPE_LENGTH:
            rows, used = [*rows, []], 0
        rows[-1] += chat
        used += length
    text = "\n".join(json.dumps({"messages": row}) for row in rows if row)
    (folder / "rows.jsonl").write_text(text + "\n")


def main() -> None:
    options = parse()
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    if "sms" in options.tasks and not (ASSETS / "ci-sms").exists():
        print("task sms is left out: FINETUNE_TEST_ASSETS names no folder with ci-sms and stories260K-eos-hf")
        options.tasks.remove("sms")
    if options.again:
        rows = [row for row in rows if "error" not in row]
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) if "shape" in options.part else None
        if large:
            make_large(large)
            for task in SHAPES:  # a process's first runs are slower: not kept
                run(Cell("shape", task, "lora", 1e-4, 0), large, [])
        if options.jobs == 1:
            for row in one_by_one(rows, options, large):
                keep(rows, row, options.out)
        else:
            for row in side_by_side(rows, options, large):
                keep(rows, row, options.out)


def one_by_one(rows: list[dict[str, Any]], options: argparse.Namespace, large: Path | None) -> Any:
    """Cells in this process, alone on the machine: what time and memory are measured with."""
    while cells := wanted(rows, options):
        yield run(cells[0], large, options.short)


def side_by_side(rows: list[dict[str, Any]], options: argparse.Namespace, large: Path | None) -> Any:
    """Run cells in parallel processes. The end of a cell can make other cells possible."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        running: dict[Any, Cell] = {}
        while True:
            for cell in wanted(rows, options):
                if cell not in running.values():
                    running[pool.submit(run, cell, large, options.short)] = cell
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                del running[done]
                yield done.result()


def keep(rows: list[dict[str, Any]], row: dict[str, Any], path: Path) -> None:
    """Add a row to the JSON, and say so."""
    rows.append(row)
    rows.sort(
        key=lambda row: (*(row[name] for name in ("part", "task")), TYPES.index(row["type"]), row["seed"])
    )
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    said = row.get("error") or row.get("tuned") or f"{row['step_seconds']:.3f} s a step"
    cell = " ".join(str(row[name]) for name in Cell._fields)
    print(f"{cell}: {said}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = ["rates", "quality", "shape"]
    parser.add_argument("--part", nargs="*", choices=parts, default=parts)
    parser.add_argument("--types", nargs="*", choices=TYPES, default=TYPES)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3, help="how many, up to six")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; use 1 for time and memory")
    parser.add_argument("--short", nargs="*", default=[], help="overrides, to try this script out")
    parser.add_argument("--again", action="store_true", help="run what failed once more")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

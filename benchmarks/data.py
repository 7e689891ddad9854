"""Measure the tokens/s of tokenizing, masking and packing with finetune and with TRL, on the same examples.

    python benchmarks/data.py ASSETS                # -> benchmarks/data.json

ASSETS has instruction data (rasbt, gsm8k, commonsense) and a Qwen2 tokenizer. Both libraries train on the
tokens of the assistant and pack to 4,096 tokens. Each row is the best of three runs. finetune is timed from
the JSONL file to the last written sequence, with the audit. TRL is timed from a loaded dataset, in two
processes and without its cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "data.json"
BUDGET, REPEATS = 4096, 3
Row = dict[str, Any]


def rows(assets: Path) -> list[Row]:
    """Return real instructions and questions as chats."""
    found = json.loads((assets / "instruct-rasbt-1100" / "instruction-data.json").read_text())
    gsm8k = (assets / "gsm8k" / "train.jsonl").read_text().splitlines()
    found += [{"instruction": row["question"], "output": row["answer"]} for row in map(json.loads, gsm8k)]
    for name in ("ARC-Easy", "ARC-Challenge", "openbookqa"):
        found += json.loads((assets / "commonsense" / f"{name}_train.json").read_text())
    asked = [f"{row['instruction']}\n\n{row.get('input', '')}".strip() for row in found]
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": row["output"]},
            ]
        }
        for question, row in zip(asked, found, strict=True)
    ]


def ours(file: Path, tokenizer: Any, folder: Path) -> Row:
    from finetune.data.preparation import prepare
    from finetune.recipe.schema import Data, Expect

    data = Data(
        name=str(file), packing=True, max_length=BUDGET, cache_dir=str(folder), expect=Expect(duplicates=1)
    )
    started = time.perf_counter()
    prepared = prepare(data, tokenizer, 0, None)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    assert prepare(data, tokenizer, 0, None).cached
    report = prepared.report["train"]
    found = {"seconds": seconds, "tokens": report.tokens, "trained_tokens": report.trained_tokens}
    return {**found, "fill": report.packing["fill"], "second_start_seconds": time.perf_counter() - started}


def trl(file: Path, tokenizer: Any, folder: Path) -> Row:
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    datasets.disable_caching()
    dataset = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder))
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=len(tokenizer),
    )
    options: Row = {"packing": True, "max_length": BUDGET, "assistant_only_loss": True, "dataset_num_proc": 2}
    arguments = SFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", **options)
    started = time.perf_counter()
    trainer = SFTTrainer(
        LlamaForCausalLM(config), args=arguments, train_dataset=dataset, processing_class=tokenizer
    )
    seconds = time.perf_counter() - started
    packed: Any = trainer.train_dataset
    tokens = sum(map(len, packed["input_ids"]))
    trained = sum(label != -100 for row in packed["labels"] for label in row)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "trained_tokens": trained,
        "fill": tokens / (len(packed) * BUDGET),
    }


def measure(assets: Path, times: int) -> Row:
    from finetune.core.console import quieten_libraries
    from finetune.data.chat_templates import bundled
    from finetune.models.tokenizer_setup import load_tokenizer
    from finetune.recipe.schema import Model

    quieten_libraries()
    tokenizer = load_tokenizer(Model(name=str(assets / "tokenizer-qwen2")), bundled()["qwen2_5"])
    tokenizer.eos_token = "<|im_end|>"
    found: Row = {"rows": 0, "budget": BUDGET, "machine": platform.processor() or platform.machine()}
    found |= {"cores": len(os.sched_getaffinity(0)), "best_of": REPEATS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        chats = rows(assets)
        lines = [json.dumps(row) for row in chats]
        file.write_text("\n".join(lines * times) + "\n")
        found["rows"] = len(lines) * times
        for name, side in (("finetune", ours), ("trl", trl)):
            runs = [side(file, tokenizer, Path(folder) / f"{name}{i}") for i in range(REPEATS)]
            best = min(runs, key=lambda run: run["seconds"])
            found[name] = {**best, "tokens_per_second": best["tokens"] / best["seconds"]}
            print(name, found[name], flush=True)
    return found


def table(found: Row) -> str:
    """The results as markdown."""
    lines = [
        "| | tokens/s | seconds | tokens | tokens in the loss | sequences filled |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("finetune", "trl"):
        side = found[name]
        cells = f"{side['tokens_per_second'] / 1e6:.2f} M | {side['seconds']:.1f} | {side['tokens']:,} | "
        lines.append(f"| {name} | {cells}{side['trained_tokens']:,} | {side['fill']:.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("assets", type=Path)
    parser.add_argument("--times", type=int, default=2, help="how often the rows are repeated")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    RESULTS.write_text(json.dumps(measure(options.assets, options.times), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure the optimizations of a recipe with `finetune ablate`, into ablation.json, .md and .svg.

    python benchmarks/ablation.py                                           # the quickstart
    python benchmarks/ablation.py --shape 8b --layers 2 --repeats 1         # Llama-3.1-8B's sizes, on a GPU
    python benchmarks/ablation.py --shape 8b --repeats 3 --steps 12         # all 32 layers

With --shape, the model has random weights. The documents have the lengths of gpu.py: log-normal, with a mean
of 400 tokens. Documents with more than 2,048 tokens are split. A step has 16 sequences in one micro-batch, or
`--rows`, so that the GPU does not wait for Python.

The files are named ablation.* on a CPU and ablation_gpu.* on a GPU. The same command resumes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import gpu_inputs
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from finetune.core import strict_yaml
from finetune.core.shipped_files import folder
from finetune.experiments.ablation import ablation

HERE = Path(__file__).parent
RECIPE = """
model: {{name: {model}}}
data: {{name: {data}, format: text, max_length: 2048, train_on: all, too_long: split, validation: {held_out}}}
adapter: {{type: lora, r: 16, lora_alpha: 32, target_modules: all-linear}}
train: {{max_steps: 100, learning_rate: 1.0e-4, effective_batch_size: {rows},
  per_device_train_batch_size: {rows}}}
"""


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--shape", choices=["8b", "1b", "tiny"], help="random weights; else the quickstart")
    parser.add_argument("--layers", type=int, help="at most so many")
    parser.add_argument("--rows", type=int, default=16, help="of a step, with --shape")
    parser.add_argument("--steps", type=int, help="of a run, in place of the file's")
    parser.add_argument("--repeats", type=int, help="of a variant, in place of the file's")
    parser.add_argument(
        "--without", default="", metavar="RUNG,...", help="optimizations that take too long here"
    )
    parser.add_argument("--optimizations", type=Path, default=folder("recipes") / "ablation.yaml")
    parser.add_argument("--work", type=Path, default=Path("/tmp/finetune-gpu"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    recipe = "recipes/quickstart.yaml"
    if options.shape:
        recipe = str(prepare(options.shape, options.layers, options.work, options.rows))
    measure = {"steps": options.steps, "repeats": options.repeats}
    steps = changed(options.optimizations, options.work, options.without.split(","), measure)
    made = ablation.run(ablation.AblationRequest(recipe, [], steps, options.out))
    command = shlex.join(["python", "benchmarks/ablation.py", *sys.argv[1:]])
    publish(made, options.out / Path(recipe).stem, command if options.shape else made["command"])
    shutil.copy(options.out / Path(recipe).stem / "ablation.html", options.out)


def publish(made: dict[str, Any], place: Path, command: str) -> None:
    """Write the table and the picture next to this file, with the command that measured them."""
    name = "ablation_gpu" if torch.cuda.is_available() else "ablation"
    for ending in ("json", "md", "svg"):
        text = (
            (place / f"ablation.{ending}")
            .read_text(encoding="utf-8")
            .replace("(ablation.svg)", f"({name}.svg)")
        )
        text = text.replace(made["command"], command)
        text = text.replace(f"{HERE.parent}/", "")  # places of this checkout
        (HERE / f"{name}.{ending}").write_text(text, encoding="utf-8")


def prepare(shape: str, layers: int | None, work: Path, rows: int) -> Path:
    """Write a recipe with a model of this shape and documents, unless it exists, and return its path."""
    layers = min(layers or 99, gpu_inputs.SHAPES[shape][2])
    model = gpu_inputs.make_model(work / f"{shape}-bf16-{layers}", shape, "bf16", layers)
    data = gpu_inputs.make_data(work / "ablation.jsonl", 200_000, documents=True)
    held_out = gpu_inputs.make_data(work / "ablation_validation.jsonl", 8_000, documents=True)
    recipe = work / f"{shape}_{layers}_layers.yaml"
    text = RECIPE.format(model=model, data=data, held_out=held_out, rows=rows)
    recipe.write_text(text, encoding="utf-8")
    return recipe


def changed(optimizations: Path, work: Path, without: list[str], measure: dict[str, int | None]) -> Path:
    """Return the ablation file without some optimizations, and with the given number of steps or repeats."""
    given = {name: value for name, value in measure.items() if value}
    if not given and without == [""]:
        return optimizations
    values = strict_yaml.parse(
        optimizations.read_text(encoding="utf-8"), str(optimizations)
    ).value  # `on` is a name here
    values["measure"] = {**values.get("measure", {}), **given}
    for optimization in values["optimizations"]:
        if optimization["name"] in without:
            optimization["elsewhere"] = "excluded from this measurement (--without)"
    work.mkdir(parents=True, exist_ok=True)
    (work / "ablation.yaml").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return work / "ablation.yaml"


if __name__ == "__main__":
    main()

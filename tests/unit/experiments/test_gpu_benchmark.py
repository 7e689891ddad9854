"""What benchmarks/gpu.py measures with, and what loss_parity.py says: checkpoints that load, rows, tables."""

import json
import random
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from finetune.autoconfig import machine_setup
from finetune.models import loading
from finetune.quantization.fp8_linear import Fp8Linear
from finetune.recipe import loader
from finetune.recipe.schema import Model
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import gpu
    import gpu_inputs
    import loss_parity
finally:
    sys.path.pop(0)


def load(folder: Path, base: str, kind: str):
    setup = machine_setup.choose(attention="auto", base=base, adapter_type=kind)
    return loading.load(Model(name=str(folder)), setup, "cpu")


HALVES = {"mlp": "mlp", "int8": "mlp_int8"}  # word of a row's name -> what it recomputes


def test_the_fp8_checkpoint_is_taken_as_it_is(tmp_path) -> None:
    from safetensors.torch import load_file

    folder = gpu_inputs.make_model(tmp_path / "tiny-fp8-6", "tiny", "fp8", 6)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == ["model-00000.safetensors", "model-00004.safetensors"]
    base = load(folder, "fp8", "lora")
    layers = {name: module for name, module in base.named_modules() if isinstance(module, Fp8Linear)}
    assert len(layers) == 6 * 7 and base.lm_head.weight.dtype != torch.float8_e4m3fn
    stored = load_file(folder / files[1])
    last = layers["model.layers.5.mlp.down_proj"]
    codes = stored["model.layers.5.mlp.down_proj.weight"]
    assert torch.equal(last.weight.view(torch.uint8), codes.view(torch.uint8))
    assert last.dequantize().float().std().item() == pytest.approx(gpu_inputs.STD, rel=0.05)
    assert torch.isfinite(base(torch.arange(9)[None]).logits).all()


def test_the_nf4_checkpoint_loads_as_a_qlora_base(tmp_path) -> None:
    import bitsandbytes as bnb

    folder = gpu_inputs.make_model(tmp_path / "tiny-nf4-2", "tiny", "nf4", 2)
    base = load(folder, "auto", "qlora")
    layers = [module for module in base.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(layers) == 2 * 7
    weight = layers[0].weight
    assert weight.quant_state.nested and weight.quant_state.quant_type == "nf4"
    made = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert made.shape == (64, 64) and made.float().std().item() == pytest.approx(gpu_inputs.STD, rel=0.05)
    assert torch.isfinite(base(torch.arange(9)[None]).logits).all()


def test_documents_have_the_lengths_that_are_said() -> None:
    lengths = gpu_inputs.document_lengths(2_000_000, random.Random(0))
    assert sum(lengths) / len(lengths) == pytest.approx(400, rel=0.03)
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(245, rel=0.03)
    assert max(lengths) < 4096 <= sum(lengths)


def test_every_row_is_a_recipe_of_the_size_that_is_said(tmp_path) -> None:
    options = Namespace(layers=None, steps=14, tiny=False, work=Path("work"), out=Path("out"))
    jobs = {name: gpu.plan(name, options) for name in {**gpu.ROWS, **gpu.RECIPES, **gpu.PEERS}}
    assert jobs["70b-fp8"].model.name == "70b-fp8-80" and jobs["70b-fp8"].length == 8192
    assert jobs["trl-full+liger"].model == jobs["full-bf16"].model == Path("work/8b-bf16-8")
    for name, job in jobs.items():
        assert (
            job.batch * job.length == 16384 * (2 if name == "141gb_fastest" else 1)
            or job.model.name[:2] != "8b"
        )
    assert {job.row.recipe for job in jobs.values() if job.row.recipe} == {
        path.name for path in (ROOT / "recipes" / "gpus").glob("*.yaml")
    }
    for job in jobs.values():
        if job.row.recipe:
            given = gpu.of_recipe(job, tmp_path)
            loaded = loader.load(ROOT / "recipes" / "gpus" / job.row.recipe, given)
            assert loaded.data.packing and job.batch % loaded.train.per_device_train_batch_size == 0
    written = tmp_path / "recipe.yaml"
    written.write_text(gpu.RECIPE.format(model="m", data="d.jsonl", length=64, batch=4, steps=9, folder="f"))
    checkpointing = {
        "70b-fp8": "mlp",
        "70b-fp8-auto": "auto",
        "70b-fp8-half": "mlp_int8",
        "cap-24": "auto",
        "cap-48": "auto",
        "lora-auto": "auto",
    }
    for name, row in gpu.ROWS.items():
        loaded = loader.load(written, row.changes)
        assert loaded.data.packing == row.packed == name.endswith("-packed")
        half = next((how for word, how in HALVES.items() if word in name), "none")
        whole = "full" if "recomputed" in name or ("small" in name and half == "none") else half
        assert loaded.speed.activation_checkpointing == checkpointing.get(name, whole)
        away = {"70b-fp8-int8": "activations", "70b-fp8-half": "activations:40"}
        assert loaded.speed.offload == away.get(name, "activations" if "small" in name else "auto")


def test_the_table_says_what_failed_and_what_packing_left_empty(tmp_path) -> None:
    (tmp_path / "log").write_text("plan\nerror: model.quantization: can't be\n  found:  a | b\n\n")
    whole = {"tokens_per_second": 1000.0, "step_seconds": 2.0, "first_step_seconds": 9.0, "peak_gib": 1.5}
    whole |= {"loss": 1.0, "gpu": "H", "torch": "2.11.0+cu130", "date": "d", "attention": "cudnn"}
    measured = {
        "a": {**whole, "tokens_per_step": 2048, "real_tokens_per_step": 2000.4},
        "b": gpu.failure(3, tmp_path / "log"),
    }
    *_, packed, failed = gpu.table(measured).splitlines()
    assert packed == "| a | 1,000 | 2,000 of 2,048 | 2.000 | 1.5 | 1.000 | 9 | cudnn | H, 2.11.0, d |"
    assert failed.startswith("| b | failed: error: model.quantization: can't be; found:  a / b |")
    assert failed.count("|") == packed.count("|")


def test_loss_parity_holds_the_others_against_the_first(tmp_path) -> None:
    def run(after: float) -> dict:
        curve = [[step, 3.0 - step / 100] for step in range(1, 41)]
        held_out = [[step, after] for step in (20, 40)]
        found = {"training": curve, "held_out": held_out, "before": 3.0, "after": after}
        return {**found, "device": "H", "torch": "2.11.0+cu130", "date": "d"}

    near = loss_parity.compared({"bf16": run(2.0), "fp8": run(2.009)})
    far = loss_parity.compared({"bf16": run(2.0), "fp8": run(1.98)})
    assert near["within"] and not far["within"]
    *_, first, second = loss_parity.table({"questions": near}).splitlines()
    assert first == "| questions | bf16 | 3.0000 | 2.0000 | +0.00% | 2.6950 | H, 2.11.0, d |"
    assert "| 2.0090 | +0.45% |" in second
    drawn = loss_parity.drawn(near)
    assert drawn.startswith("<svg") and "fp8, held out" in drawn


def test_a_book_is_cut_between_paragraphs_and_no_word_is_lost() -> None:
    paragraphs = ["word " * count for count in (100, 250, 40, 5, 290)]
    pieces = loss_parity.passages("\n\n".join(paragraphs[:3]) + "<|endoftext|>" + "\n\n".join(paragraphs[3:]))
    assert sum(piece.count("word") for piece in pieces) == 685 and len(pieces) == 3
    assert max(map(len, pieces)) <= loss_parity.ROW_CHARACTERS + 4


def test_the_page_names_every_row_and_the_bars_are_near(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bars

    measured = json.loads(bars.RESULTS.read_text())
    page = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()
    made = bars.table(measured)
    short = [float(share) for share in re.findall(r"\| ([\d.]+)% \|", made)]
    assert min(short, default=100.0) > 93 and made.count("| yes |") >= 13
    (command,) = re.findall(r"benchmarks/gpu.py --rows (\S+)` -> `gpu.json`", page)
    assert set(command.split(",")) == measured.keys()

"""Two ranks of one launch: one step however its rows are split, FSDP2 on each base, ranks that disagree.

The two ranks are started once for all tests; see `one_rank`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.adapters import initialization, trainable_parameters
from finetune.core.errors import UserError
from finetune.distributed import collectives, sharded_tensors
from finetune.models.fingerprint import fingerprint
from finetune.models.loading import without_weights
from finetune.quantization import four_bit
from finetune.speed import lm_head_loss
from finetune.training import verify_saved
from support import two_ranks, weighted_rows
from support.faults import Fault
from support.four_bit import in_four_bits
from support.in_float64 import eight_steps, step
from support.paths import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = (4, 1)  # of one pass, where a step has eight: two processes, without and with accumulation
BY_RANK_0 = ("lora by rank 0", "untied by rank 0", "full by rank 0")  # who alone reads the base
SKIPS = ("train.max_steps=3",)
FSDP = ("lora", "dora", "fp8", "nf4", "full", *BY_RANK_0)
IDS = torch.arange(3, 27).reshape(2, 12)


def small_base(kind: str, *, read: bool) -> Any:
    """Two layers of the embedded model in bf16; not `read`: as a process has it that waits for rank 0's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODEL)
    config.tie_word_embeddings = "untied" not in kind
    if not read:
        config.num_hidden_layers = 2
        return without_weights(config, torch.bfloat16)
    base: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    base.model.layers = base.model.layers[:2]
    base.config.num_hidden_layers = 2
    if "untied" in kind:
        base.config.tie_word_embeddings = False
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().flip(0))
    return base


def small_model(kind: str, *, read: bool = True) -> Any:
    """`small_base` under an adapter that is not zero (`full`: under none)."""
    from peft import LoraConfig, get_peft_model

    from finetune.quantization.fp8_linear import Fp8Linear, fits

    base = small_base(kind, read=read)
    if "full" in kind:
        return base.float()
    if kind == "fp8":
        for name, module in list(base.model.layers.named_modules()):
            if fits(module):
                base.model.layers.set_submodule(name, Fp8Linear.of(module))
                base.model.layers.get_submodule(name).pack()
    if kind == "nf4":
        base = in_four_bits(base, storage=torch.float32)
    torch.manual_seed(1 if read else 2)
    config = LoraConfig(r=8, target_modules="all-linear", use_dora=kind == "dora", task_type="CAUSAL_LM")
    made = get_peft_model(base, config)
    for name, parameter in trainable_parameters.trainable(made).items():
        parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return made


def split(model: Any, *, by_rank_0: bool) -> Any:
    """By Accelerate's own code for FSDP2, on a mesh of CPUs: its Accelerator would run DDP there."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.device_mesh import init_device_mesh

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
        cpu_ram_efficient_loading=by_rank_0,
    )  # fmt: skip
    plugin.mixed_precision_policy = four_bit.fsdp_policy("bf16", model)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16", device=torch.device("cpu"),
        is_main_process=os.environ["RANK"] == "0",
        torch_device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp",)),
    )  # fmt: skip
    return fsdp2_prepare_model(accelerator, model)


def gradients(model: Any) -> torch.Tensor:
    """Of the loss of two rows: both at once, or one by each rank if the model is split.

    By our loss: it reads the head's weight, wherever that is.
    """
    split = sharded_tensors.sharded(model)
    mine = IDS[int(os.environ["RANK"]) :][:1] if split else IDS
    model.train()
    with contextlib.nullcontext() if split else torch.autocast("cpu", torch.bfloat16):
        ours = lm_head_loss.install(model, compiled=False)
        summed = model(input_ids=mine, labels=mine, num_labels=mine.shape[1] * len(mine) - len(mine)).nll
        assert summed.dtype == torch.float32, "not what FSDP casts"
        (summed / len(mine)).backward()
        ours.undo()
    found = [sharded_tensors.whole(p.grad) for p in trainable_parameters.trainable(model).values()]
    return torch.cat([gradient.flatten().float() for gradient in found])


def under_fsdp(kind: str, folder: Path) -> dict[str, Any]:
    """What becomes of a model that is split: hashes, logits, and what is saved of it."""
    by_rank_0 = kind in BY_RANK_0
    whole = small_model(kind)
    parts = small_model(kind, read=not by_rank_0 or os.environ["RANK"] == "0")
    before = fingerprint(trainable_parameters.frozen(whole))
    parts = split(parts, by_rank_0=by_rank_0)
    found: dict[str, Any] = {"frozen": [before, fingerprint(trainable_parameters.frozen(parts))]}
    found["trained"] = [verify_saved.fingerprints(model) for model in (whole, parts)]
    local = sum(p.to_local().numel() for p in parts.parameters())
    found["share"] = local / sum(p.numel() for p in parts.parameters())
    both = [gradients(whole), gradients(parts)]
    found["off"] = float((both[0] - both[1]).norm() / both[0].norm())
    for model in (whole, parts):
        for parameter in trainable_parameters.trainable(model).values():
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None
    both = [gradients(whole), gradients(parts)]  # of a second step: what the first gathered is split again
    found["off again"] = float((both[0] - both[1]).norm() / both[0].norm())
    found["frozen"].append(fingerprint(trainable_parameters.frozen(parts)))
    shapes = {name: p.shape for name, p in trainable_parameters.trainable(parts).items()}
    found["hashes"] = verify_saved.hashes(parts, shapes)
    state = sharded_tensors.gathered(parts)
    if os.environ["RANK"] == "0":
        initialization.save(parts, folder / kind, folder / "none", state)
    torch.distributed.barrier()
    return found


def one_rank(folder: str, data: str, base: str) -> None:
    rank, found = os.environ["RANK"], dict[str, Any]()
    for rows in ROWS:
        kept = step(Path(folder) / "trainer", data, base, rows)
        found[f"sent {rows}"] = kept.sent
        found["unused"] = kept.trainer.model_wrapped.find_unused_parameters
        found["by DDP"] = kept.by_ddp
        save_file(kept.gradients, Path(folder) / f"rank{rank}-{rows}.safetensors")
    weighted = f"data.name={folder}/weighted.jsonl"
    kept = step(Path(folder) / "weighted", weighted, base, 2)
    save_file(kept.gradients, Path(folder) / f"rank{rank}-weighted.safetensors")
    for rows in (4, 2):
        save_file(
            eight_steps(Path(folder), base, rows), Path(folder) / f"rank{rank}-{rows}-eight.safetensors"
        )
    kept = step(Path(folder) / "trainer", data, base, 4, Fault("oom", step=1, rank=1))
    found["parts"] = kept.trainer.micro_batches.parts
    save_file(kept.gradients, Path(folder) / f"rank{rank}-oom.safetensors")
    for kind in ("nan", "input"):
        try:
            step(Path(folder) / kind, data, base, 4, Fault(kind, step=1, rank=1))
        except UserError as error:
            found[kind] = str(error)
    kept = step(Path(folder) / "skips", data, base, 4, Fault("nan", step=2, rank=1), more=SKIPS, allowed=1)
    found["skipped"] = kept.stops.skipped
    save_file(kept.weights, Path(folder) / f"rank{rank}-skips.safetensors")
    try:
        step(Path(folder) / "spoilt", data, base, 4, spoils="1")
    except UserError as error:
        found["spoilt"] = str(error)
    said = []
    for facts in ({"seed": "1"}, {"seed": rank, "torch": "2", **({"extra": "x"} if rank == "1" else {})}):
        try:
            collectives.agree(facts)
            said.append("")
        except UserError as error:
            said.append(str(error))
    found["agree"] = said
    for kind in FSDP:
        found[kind] = under_fsdp(kind, Path(folder))
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def both(small, two_layers, tmp_path_factory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """What both ranks found, and the folder with their tensors."""
    folder = tmp_path_factory.mktemp("ranks")
    weighted_rows.write(folder / "weighted.jsonl")
    shared = tmp_path_factory.getbasetemp().parent  # as `the_only_launch`, which is each test's
    with (shared / "launch.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        two_ranks.run(one_rank, str(folder), small[0], str(two_layers))
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_one_step_however_its_rows_are_split(both, small, two_layers, tmp_path) -> None:
    """1 x 8, accumulation 8, 2 x 4, 2 x 1 x 4, and 2 x 4 where one runs out of memory: all in float64."""
    folder, found = both
    assert [each["parts"] for each in found] == [2, 2], "both halve what one can't hold"
    whole = step(tmp_path, small[0], str(two_layers), 8).gradients
    made = {"1 x 1 x 8": step(tmp_path, small[0], str(two_layers), 1).gradients}
    for rows in (*ROWS, "oom"):
        two = [load_file(folder / f"rank{rank}-{rows}.safetensors") for rank in (0, 1)]
        mean = sum(found["loss"] for found in two) / 2  # of what each rank has of it
        made |= {f"rank {rank}, {rows}": {**found, "loss": mean} for rank, found in enumerate(two)}
    assert len(whole) == 29 and float(whole["loss"]) > 1
    for name, found in made.items():
        assert found.keys() == whole.keys()
        for key, wanted in whole.items():
            assert float((found[key] - wanted).norm()) <= 1e-12 * float(wanted.norm()), (name, key)


def test_a_weighted_step_of_two_ranks_is_the_step_of_one(both, two_layers, tmp_path) -> None:
    """Also with accumulation: each rank has another sum of weights in each of its two micro-batches."""
    folder = both[0]
    one = step(tmp_path, f"data.name={folder}/weighted.jsonl", str(two_layers), 8).gradients
    two = [load_file(folder / f"rank{rank}-weighted.safetensors") for rank in (0, 1)]
    assert float(two[0]["loss"] + two[1]["loss"]) / 2 == pytest.approx(float(one["loss"]), rel=1e-12)
    for found in two:
        for key in one.keys() - {"loss"}:
            assert float((found[key] - one[key]).norm()) <= 1e-12 * float(one[key].norm()), key


def test_eight_steps_however_their_rows_are_split(both, two_layers, tmp_path) -> None:
    """Parameters: 1 x 8, 4 x 2, 8 x 1, 2 x 2 x 2 and 2 x 4, with epochs that end with half a step.

    With two processes and four examples each, Accelerate fills the last batch with the first examples of the
    epoch, and a run check counts them. One process that trains the same examples learns the same.
    """
    whole, longer = (eight_steps(tmp_path, str(two_layers), 8, repeats=repeats) for repeats in (False, True))
    made = {f"1 x {rows}": (eight_steps(tmp_path, str(two_layers), rows), whole) for rows in (4, 2, 1)}
    for rank, (rows, wanted) in itertools.product((0, 1), ((2, whole), (4, longer))):
        found = load_file(both[0] / f"rank{rank}-{rows}-eight.safetensors")
        made[f"rank {rank}, {rows}"] = found, wanted
    for name, (found, wanted) in made.items():
        assert found.keys() == wanted.keys() and len(wanted) == 28
        for key, tensor in wanted.items():
            assert float((found[key] - tensor).norm()) <= 1e-12 * float(tensor.norm()), (name, key)
    assert all(float((whole[key] - longer[key]).norm()) > 1e-6 for key in whole), "the repeat is seen"


def test_an_adapters_gradients_are_sent_once_a_step_in_one_bucket(both) -> None:
    _, (found, other) = both
    bytes_of_all = sum(p.numel() * 8 for p in trainable_parameters.trainable(small_model("lora")).values())
    assert found["sent 4"] == found["sent 1"] == other["sent 1"] and len(found["sent 1"]) == 1
    assert found["sent 1"][0] == 2 * bytes_of_all, "r = 16, in float64"
    assert found["by DDP"] == [], "which sends nothing by itself"
    assert found["unused"] is False, "transformers' default for a PeftModel is True"


def test_a_gradient_that_one_rank_alone_lost_stops_both_before_the_update(both) -> None:
    folder, found = both
    for each in found:
        assert "gradients of step 1 are NaN or Inf" in each["nan"]
        assert "rank 0: finite when the step was repeated" in each["nan"] and "rank 1: " in each["nan"]
        assert "rank 1: the output of base_model.model.model.embed_tokens" in each["input"]
        assert "rank 0: finite" in each["input"]
    place = folder / "nan" / "nonfinite-step-1"
    assert {file.name for file in place.iterdir()} == {
        "batches-rank0.safetensors",
        "batches-rank1.safetensors",
        "finding.json",
    }
    rows = json.loads((place / "finding.json").read_text())["rows"]
    assert [len(batch) for rank in (0, 1) for batch in rows[f"rank {rank}"]] == [4, 4]


def test_a_step_that_one_rank_spoils_is_left_out_by_both(both, small, two_layers, tmp_path) -> None:
    """And what they have learnt is what one process has that leaves out the same step."""
    folder, found = both
    one = step(tmp_path, small[0], str(two_layers), 8, Fault("nan", step=2), more=SKIPS, allowed=1)
    assert [each["skipped"] for each in found] == [1, 1] and one.stops.skipped == 1
    for rank in (0, 1):
        weights = load_file(folder / f"rank{rank}-skips.safetensors")
        for key, tensor in one.weights.items():
            assert float((weights[key] - tensor).norm()) <= 1e-9 * float(tensor.norm()), key


def test_a_gradient_spoilt_on_one_rank_after_the_exchange_stops_both_too(both) -> None:
    """The other one's are finite; without a word from the first it would wait in the next exchange."""
    for each in both[1]:
        assert "gradients of step 1 are NaN or Inf" in each["spoilt"] and "inf" in each["spoilt"]


def test_ranks_that_mean_different_runs_all_say_so(both) -> None:
    for found in both[1]:
        agreed, said = found["agree"]
        assert agreed == "" and "seed: rank 0: 0, rank 1: 1" in said
        assert "differ in extra, seed [launch-config]\n" in said
        assert said.count("error:") == 1 and "torch" not in said


@pytest.mark.parametrize("kind", FSDP)
def test_a_model_that_fsdp2_split_is_the_same_model(kind: str, both) -> None:
    """Each rank has half of every tensor; gradients are the whole model's as far as bf16 goes."""
    for found in (one[kind] for one in both[1]):
        assert 0.49 < found["share"] < 0.51
        assert len(set(found["frozen"])) == 1, "whole, split, after training"
        whole, parts = found["trained"]
        assert whole == parts and len(whole) == {"dora": 42, "full": 20}.get(kind.split()[0], 28)
        assert found["off"] < 0.02 and found["off again"] < (0.05 if kind == "fp8" else 0.02)


@pytest.mark.parametrize("kind", FSDP)
def test_what_is_saved_of_a_split_model_is_whole(kind: str, both) -> None:
    folder, (found, _) = both
    name = "model.safetensors" if "full" in kind else "adapter_model.safetensors"
    saved = load_file(folder / kind / name)
    on_disk = re.compile(r"(?<=magnitude_vector)\.default\.weight$|\.default(?=\.)")
    trained = {on_disk.sub("", key): (key, value) for key, value in found[kind]["hashes"].items()}
    assert saved.keys() == trained.keys()
    for key, (live, digest) in trained.items():
        assert fingerprint({live: saved[key].float()}) == digest, key
    assert all(tensor.numel() and tensor.any() for tensor in saved.values())

"""AdaLoRA: the same numbers as PEFT's, on any split of the batch, and the same again after a stop.

Run as a script it is two ranks of one launch: see `sft`.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from finetune.adapters import adalora
from finetune.core.errors import Exit, UserError
from finetune.training.trainer import Trainer
from support import two_ranks
from support.adalora_steps import STEPS, adamw, same, tiny
from support.faults import Fault, injected
from support.paths import QUICKSTART
from support.runs import run_checks
from support.trainers import trainer_parts


def learn(model, optimizer, steps, *, allocate=adalora.allocate, after=None) -> None:
    """A plain loop over fixed batches: forward, the regulariser, AdamW, allocation. Dropout draws numbers."""
    named, vectors, masks = adalora.tensors(model), adalora.singular_vectors(model), {}
    for step in steps:
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model.base_model.model(input_ids=ids, labels=ids).loss + 0.5 * adalora.orthogonality(vectors)
        loss.backward()
        optimizer.step()
        allocate(model, step, named, masks)
        optimizer.zero_grad()
        if after:
            after(step)


def plain_orthogonality(model) -> torch.Tensor:
    norms = []
    for name, p in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            gram = p @ p.T if "lora_A" in name else p.T @ p
            norms.append(torch.linalg.matrix_norm(gram - torch.eye(len(gram))))
    return torch.stack(norms).mean()


def test_orthogonality_is_peft_s() -> None:
    """Our regulariser against the one PEFT adds to `outputs.loss`, and its gradient against autograd's."""
    model, _ = tiny(orth_reg_weight=0.5)
    ids = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        with_term = model(input_ids=ids, labels=ids).loss
        plain = model.base_model.model(input_ids=ids, labels=ids).loss
    ours = adalora.orthogonality(adalora.singular_vectors(model))
    assert (with_term - plain).item() == pytest.approx(0.5 * ours.item(), abs=1e-5)
    named = {n: p for n, p in model.named_parameters() if "lora_A" in n or "lora_B" in n}
    got = torch.autograd.grad(3 * ours, list(named.values()))
    wanted = torch.autograd.grad(3 * plain_orthogonality(model), list(named.values()))
    for a, b in zip(got, wanted, strict=True):
        assert torch.linalg.norm(a - b) <= 1e-6 * torch.linalg.norm(b)


def test_orthonormal_vectors_have_no_gradient_and_16_bits_get_their_own() -> None:
    eye = nn.Parameter(torch.eye(4, 8, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        value = adalora.orthogonality([(True, [eye])])
    value.backward()
    assert value.item() == 0 and value.dtype == torch.float32
    assert eye.grad is not None and eye.grad.dtype == torch.bfloat16 and not eye.grad.any()


def test_allocation_is_peft_s_bit_for_bit() -> None:
    ours, _ = tiny(deltaT=2)
    theirs, _ = tiny(deltaT=2)
    learn(ours, adamw(ours), range(1, 8))

    def peft(model, step, named, masks) -> None:
        model.base_model.update_and_allocate(step)

    learn(theirs, adamw(theirs), range(1, 8), allocate=peft)
    assert same(adalora.allocation_state(ours), adalora.allocation_state(theirs))
    learn(ours, adamw(ours), range(8, STEPS + 1))
    learn(theirs, adamw(theirs), range(8, STEPS + 1), allocate=peft)
    assert same(adalora.allocation_state(ours), adalora.allocation_state(theirs))


def test_ranks_in_use_are_asked_for_by_who_wants_to_know() -> None:
    """And not at each allocation, after which a GPU would wait for Python."""
    model, _ = tiny()
    learn(model, adamw(model), range(1, 6))
    config = model.peft_config["default"]
    assert config.rank_pattern is None
    used, budget = adalora.ranks(model)
    kept = sum(map(sum, config.rank_pattern.values()))
    zeros = sum(int((p == 0).sum()) for n, p in model.named_parameters() if "lora_E" in n)
    assert used == kept == 6 * 14 - zeros and 3 * 14 == budget < used < 6 * 14


@pytest.mark.parametrize("steps", [6, 12])
@pytest.mark.parametrize("every", [1, 4, 5])
def test_ranks_reach_the_budget(steps: int, every: int) -> None:
    targets = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}
    for options in ({}, targets):
        schedule = {"total_step": steps, "tinit": steps // 10, "tfinal": steps // 3, "deltaT": every}
        model, _ = tiny(**schedule, **options)
        learn(model, adamw(model), range(1, steps + 1))
        used, budget = adalora.ranks(model)
        assert used == budget == 3 * (2 if options else 14)
        zeros = sum(int((p == 0).sum()) for n, p in model.named_parameters() if "lora_E" in n)
        assert zeros == budget, "6 - 3 = 3 of each module on average are masked"


def test_a_budget_that_is_missed_ends_the_run() -> None:
    """Where nothing was learnt all importances are equal, and PEFT's threshold takes every rank."""
    model, _ = tiny()
    named = adalora.tensors(model)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(UserError, match=r"misses its rank budget in its last allocation .step 8") as ended:
        for step in range(1, STEPS + 1):
            adalora.allocate(model, step, named, {})
    assert ended.value.code == Exit.TRAINING and "0 ranks" in str(ended.value)


def test_the_last_allocation_is_made_at_a_step_that_is_left_out(train) -> None:
    """It takes no gradients, and no later one takes its place; a run that is resumed there knows of it."""
    given = ["adapter.type=adalora", "adapter.r=4", "adapter.tinit=1", "adapter.tfinal=2"]
    given += ["train.max_steps=6", "train.skip_nonfinite=2"]
    with injected(Fault("nan", step=4)):
        straight = train(*given, name="straight")
        train(*given, "--until=4", code=75)
    resumed = train(*given, "--resume")
    assert "step 4 is skipped" in (straight.path / "log.txt").read_text()
    assert run_checks(straight)["AdaLoRA ranks"]["actual"] == "56"
    assert same(*(load_file(run.adapter / "adapter_model.safetensors") for run in (straight, resumed)))


def test_no_step_that_counted_before_the_last_allocation_ends_the_run() -> None:
    model, _ = tiny()
    with pytest.raises(UserError, match=r"misses its rank budget in its last allocation .step 8"):
        adalora.allocate(model, STEPS - 4, adalora.tensors(model), {})


def test_a_module_without_ranks_loads_in_plain_peft(tmp_path) -> None:
    from peft import PeftModel

    model, _ = tiny(init_r=2, target_r=1)
    learn(model, adamw(model), range(1, STEPS + 1))
    kept = [sum(mask) for mask in model.peft_config["default"].rank_pattern.values()]
    assert min(kept) == 0 and max(kept) == 2
    ids = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        masked = model.eval()(ids).logits
        adalora.drop_masked_ranks(model)
        live = model.eval()(ids).logits
        model.save_pretrained(tmp_path)
        reopened = PeftModel.from_pretrained(tiny()[0].unload(), tmp_path).eval()
        assert torch.equal(live, reopened(ids).logits)
        assert torch.allclose(masked, live, atol=1e-6)
        merged = reopened.merge_and_unload()
        assert torch.allclose(merged(ids).logits, live, atol=1e-5)


@pytest.mark.parametrize("stop", [1, 5, 8, 10])
def test_after_a_stop_everything_is_the_same(stop: int, tmp_path) -> None:
    """Before tinit, in the middle of pruning, at the last allocation, after it. Bit for bit, from disk."""
    straight, _ = tiny(lora_dropout=0.1)
    torch.manual_seed(7)
    learn(straight, adamw(straight), range(1, STEPS + 1))

    first, _ = tiny(lora_dropout=0.1)
    optimizer = adamw(first)
    torch.manual_seed(7)
    learn(first, optimizer, range(1, stop + 1))
    save_file(adalora.allocation_state(first), tmp_path / "state.safetensors")
    torch.save((optimizer.state_dict(), torch.get_rng_state()), tmp_path / "optimizer.pt")
    del first, optimizer

    second, _ = tiny(lora_dropout=0.1)
    with torch.no_grad():
        for parameter in second.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    saved = load_file(tmp_path / "state.safetensors")
    adalora.restore_allocation(second, saved)
    assert same(adalora.allocation_state(second), saved)
    optimizer = adamw(second)
    moments, draws = torch.load(tmp_path / "optimizer.pt")
    optimizer.load_state_dict(moments)
    torch.set_rng_state(draws)
    learn(second, optimizer, range(stop + 1, STEPS + 1))
    assert same(adalora.allocation_state(second), adalora.allocation_state(straight))
    assert second.peft_config["default"].rank_pattern == straight.peft_config["default"].rank_pattern


def test_saving_on_the_way_changes_nothing(tmp_path) -> None:
    """PEFT renames the masks in the live config as it saves."""
    undisturbed, saved = tiny()[0], tiny()[0]
    names = []

    def save(step: int) -> None:
        saved.save_pretrained(tmp_path / str(step))
        names.append(sorted(adalora.allocation_state(saved)))

    learn(undisturbed, adamw(undisturbed), range(1, STEPS + 1))
    learn(saved, adamw(saved), range(1, STEPS + 1), after=save)
    assert same(adalora.allocation_state(undisturbed), adalora.allocation_state(saved))
    assert names[-1] == sorted(adalora.allocation_state(undisturbed))
    keys = iter(saved.peft_config["default"].rank_pattern)
    assert "default" not in next(keys), "PEFT no longer renames: `allocation_state` can be simpler"


def test_a_state_of_another_model_is_refused() -> None:
    model, _ = tiny()
    learn(model, adamw(model), range(1, 6))
    state = {name: tensor.clone() for name, tensor in adalora.allocation_state(model).items()}
    other, _ = tiny(init_r=5)
    before = {name: tensor.clone() for name, tensor in adalora.allocation_state(other).items()}
    with pytest.raises(UserError) as refused:
        adalora.restore_allocation(other, state)
    text = str(refused.value)
    assert refused.value.code == Exit.ARTIFACT and "does not fit this model (182 tensors)" in text
    assert "found:     (6, 32) float32" in text and "expected:  (5, 32) float32" in text
    assert same(before, adalora.allocation_state(other)), "nothing was changed"
    mask = next(name for name in state if name.startswith("mask."))
    for wrong, said in (
        ({k: v for k, v in state.items() if k != mask}, "no such tensor"),
        ({**state, "more": torch.zeros(1)}, "(more)"),
        ({**state, mask: state[mask].float()}, "(6,) float32"),
    ):
        with pytest.raises(UserError, match=r"\(1 tensors?\)") as refused:
            adalora.restore_allocation(tiny()[0], wrong)
        assert said in str(refused.value)


class Keep(TrainerCallback):
    """The gradients of each optimizer step, as the optimizer gets them."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients.append({name: p.grad.clone() for name, p in trained.items()})


def sft(folder: Path, *overrides: str, every: int = 1, counted: bool = True, keep: Keep | None = None):
    """The quickstart's trainer with AdaLoRA, trained -> the model; `keep` gets each step's gradients."""
    from transformers import set_seed

    from finetune.adapters import attach
    from finetune.autoconfig import machine_setup
    from finetune.autoconfig.batch_size import split_batch
    from finetune.core.console import Console
    from finetune.core.run_checks import RunChecks
    from finetune.models import loading
    from finetune.recipe import loader
    from finetune.run_folder.run_folder import RunFolder
    from finetune.training import load_data, step_metrics, training_arguments

    given = ["adapter.type=adalora", "adapter.r=4", "train.effective_batch_size=8", "train.max_grad_norm=1e9"]
    given += ["train.max_steps=6", "train.warmup_steps=0", "data.validation=null", *overrides]
    given += [f"adapter.orth_reg_every={every}"]
    loaded = loader.load(QUICKSTART, given)
    setup = machine_setup.choose(attention="sdpa", base="auto", adapter_type="adalora")
    batch = split_batch(loaded.train, setup.launch.processes)
    arguments = training_arguments.training_arguments(loaded.train, loaded.data, setup, batch)
    arguments.output_dir = str(folder)
    set_seed(loaded.train.seed)
    tokenizer, prepared = load_data.prepare_data(loaded)
    base = loading.load(loaded.model, setup, str(arguments.device))
    adapted = attach.attach(base, loaded.adapter, arguments.max_steps, RunChecks())
    screen = Console(quiet=True)
    metrics = step_metrics.Metrics(
        RunFolder(folder), screen, setup, batch=batch.effective, flops_per_token=1.0
    )
    parts = trainer_parts(adapted, arguments, loaded, setup, metrics)
    trainer = Trainer(adapted, arguments, prepared.train, tokenizer, parts)
    trainer.model_accepts_loss_kwargs = counted
    trainer.add_callback(keep or Keep())
    trainer.train()
    return adapted


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||b||, the larger of E's and of the vectors'."""

    def norm(tensors) -> float:
        return float(torch.linalg.norm(torch.cat([t.flatten() for t in tensors])))

    assert a.keys() == b.keys()
    values = [[n for n in a if "lora_E" in n], [n for n in a if "lora_E" not in n]]
    return max(norm(a[n] - b[n] for n in names) / norm(b[n] for n in names) for names in values)


def split(rows: int) -> str:
    return f"train.per_device_train_batch_size={rows}"


STRONG = "adapter.orth_reg_weight=50"


@pytest.fixture(scope="module")
def short(small, two_layers) -> list[str]:
    return [STRONG, small[0], f"model.name={two_layers}"]


@pytest.fixture(scope="module")
def in_one(short, tmp_path_factory) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, and the gradients of the first step, where a batch is not split."""
    keep = Keep()
    return sft(tmp_path_factory.mktemp("in_one"), *short, split(8), keep=keep), keep.gradients[0]


@pytest.mark.usefixtures("the_only_launch")
def test_two_processes_and_micro_batches_make_one_step(in_one, short, tmp_path) -> None:
    """The same gradients with the regulariser strong, the same ranks on both processes and on one."""
    (whole, of_whole), of_parts = in_one, Keep()
    parts = sft(tmp_path, *short, split(2), keep=of_parts)
    assert apart(of_parts.gradients[0], of_whole) < 1e-6
    two_ranks.run(one_rank, str(tmp_path), *short, split(2))
    one, two = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1))
    assert same(one, two), "gradients, weights and masks of both processes"
    gradients = {n.removeprefix("gradient."): t for n, t in one.items() if n.startswith("gradient.")}
    assert apart(gradients, of_whole) < 1e-6
    wanted = adalora.allocation_state(whole)
    masks = {name: tensor for name, tensor in one.items() if name.startswith("mask.")}
    assert len(masks) == 14 and sum(int(mask.sum()) for mask in masks.values()) == 4 * len(masks)
    assert all(torch.equal(mask, wanted[name]) for name, mask in masks.items())
    assert same(masks, {n: t for n, t in adalora.allocation_state(parts).items() if n in masks})


def test_a_loss_without_a_token_count_weighs_the_same(in_one, short, tmp_path) -> None:
    """The Trainer then divides the loss by the micro-batches; the term must come out whole."""
    of_parts = Keep()
    sft(tmp_path, *short, split(2), keep=of_parts, counted=False)
    counted, uncounted = in_one[1], of_parts.gradients[0]
    vectors = [name for name in counted if "lora_E" not in name]  # E = 0: theirs is the term's alone
    for name in vectors:
        error = torch.linalg.norm(counted[name] - uncounted[name]) / torch.linalg.norm(counted[name])
        assert error < 1e-6


def test_every_second_step_pulls_twice_as_much(short, tmp_path) -> None:
    each, second = Keep(), Keep()
    for every, keep in ((1, each), (2, second)):  # at rate 0 every step sees the same weights
        sft(tmp_path, *short, split(4), "train.learning_rate=0", every=every, keep=keep)
    for name in (name for name in each.gradients[0] if "lora_E" not in name):
        for step in (0, 1, 2, 3):
            wanted = 2 * each.gradients[step][name] if step % 2 else torch.zeros(1)
            assert torch.allclose(second.gradients[step][name], wanted, rtol=1e-6, atol=0), (
                "E = 0: the term's alone"
            )


def one_rank(folder: str, *overrides: str) -> None:
    kept = Keep()
    state = adalora.allocation_state(sft(Path(folder), *overrides, keep=kept))
    state |= {f"gradient.{name}": tensor for name, tensor in kept.gradients[0].items()}
    save_file(state, Path(folder) / f"rank{os.environ['RANK']}.safetensors")

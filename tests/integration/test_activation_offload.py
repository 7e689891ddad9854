"""What backward needs of layers in the CPU's memory, and what is made again: the same loss and gradients."""

import copy
import gc
import weakref

import pytest
import torch

from finetune.autoconfig import compilation
from finetune.cli import main
from finetune.core.run_checks import Choice, RunChecks
from finetune.hardware.detection import Hardware
from finetune.recipe.schema import Speed
from finetune.speed import activation_offload, apply_to_model, live_model_spec
from finetune.speed.fused_layers import Fused
from support import two_ranks
from support.offloading import assert_same, batches, gradients, model_of
from support.paths import QUICKSTART
from support.soak import soak_except


@pytest.mark.parametrize("recomputed", [1, 2])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_inputs_that_left_and_came_back_change_nothing(kind: str, recomputed: int) -> None:
    model = model_of(kind)
    plain = gradients(model)
    layers, checks = live_model_spec.decoder_layers(model), RunChecks()
    apply_to_model.add_activation_checkpointing(model, layers, recomputed, checks)
    chosen = [layer for layer in layers if layer.gradient_checkpointing]
    made = activation_offload.Activations(chosen, model.device)
    assert activation_offload.of(model) is made
    assert_same(plain, gradients(model))
    assert made.out == made.back == 2 * recomputed  # micro-batches
    assert made.bytes == made.out * 2 * 32 * model.config.hidden_size * 4
    made.add_run_check(2, checks)
    checks.check()
    made.add_run_check(3, checks)  # of which one has moved nothing
    assert not checks.entries[-1].passed


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_what_half_recomputed_layers_keep_changes_nothing(kind: str) -> None:
    """Norms and MLPs are made again, what is left leaves: inputs, attention's q, k, v and output."""
    model = model_of(kind)
    layers = live_model_spec.decoder_layers(model)
    apply_to_model.add_fused(model, Choice("on", "asked for"), RunChecks())
    plain = gradients(model)
    checks = RunChecks()
    apply_to_model.add_activation_checkpointing(model, layers, 0, checks, mlps=len(layers))
    made = activation_offload.Activations(layers, model.device)
    assert_same(plain, gradients(model))
    one = 2 * 32 * model.config.hidden_size * 4  # bytes of a layer's input
    assert made.out == made.back == 4 and made.bytes >= 4 * 4 * one
    passing = activation_offload.Pass(layers[0], 1, None)
    assert all(passing.holds(weight) for weight in layers[0].parameters())
    assert not passing.holds(torch.ones(8, 8)) and passing.holds(torch.ones(8, 8)[:, :4])
    made.add_run_check(2, checks)
    checks.check()


def test_some_layers_alone_may_leave_what_they_keep() -> None:
    """`activations:1`, beside gate and up in int8."""
    model = model_of("lora")
    asked = Speed(fused=True, activation_checkpointing="mlp_int8", offload="activations:1")
    cpu = Hardware("cpu", "CPU", 1, (0, 0), 16.0, 2)
    chosen = apply_to_model.apply(model, asked, compilation.Work(64, 1e9), cpu, checks := RunChecks())
    made = activation_offload.of(model)
    assert made and made.layers == live_model_spec.decoder_layers(model)[:1] and chosen.offload.value
    order = list[str]()
    fetch, last = made.fetch, live_model_spec.decoder_layers(model)[-1].mlp.down_proj.lora_A["default"].weight
    made.fetch = lambda owner: (order.append("fetch"), fetch(owner))[1]
    last.register_post_accumulate_grad_hook(lambda _: order.append("last layer's gradient"))
    gradients(model)
    assert made.out == made.back == 2  # micro-batches
    assert order == 2 * ["fetch", "last layer's gradient"]  # it comes while that layer is computed
    made.add_run_check(2, checks)
    checks.check()


@pytest.mark.parametrize("half", soak_except(["int8"], ["cheap", "int8", "mlp"]))
def test_what_is_made_again_is_not_kept_when_compiled(half: str) -> None:
    """A compiler sees that forward and backward make the same product, and would keep it."""
    model, saved = model_of("lora"), list[tuple[torch.Size, torch.dtype]]()
    layers = live_model_spec.decoder_layers(model)[:1]
    Fused(model, layers)
    plain = gradients(model)
    apply_to_model.add_activation_checkpointing(
        model, layers, 0, RunChecks(), mlps=half == "mlp", rounded=half == "int8"
    )
    layers[0].compile(backend="aot_eager_decomp_partition")

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor.shape, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses, found = gradients(model)
    both = torch.Size([64, 2 * model.config.intermediate_size])
    kept = {dtype for shape, dtype in saved if shape == both}
    assert kept == {"cheap": {torch.float32}, "int8": {torch.int8}, "mlp": set()}[half]
    assert losses == pytest.approx(plain[0], rel=1e-6)
    for name, gradient in plain[1].items():
        off = float((gradient - found[name]).norm() / gradient.norm()) if gradient.any() else 0.0
        assert off < (0.02 if half == "int8" else 1e-4), name


@pytest.mark.parametrize("how", soak_except(["int8"], ["cheap", "int8", "mlp"]))
def test_layers_alike_are_compiled_once(how: str) -> None:
    """The first layer's input has no gradient, all others share one graph: 80 layers took minutes."""
    model = model_of("lora")
    model.config.use_cache = False
    layers = live_model_spec.decoder_layers(model)
    layers += [copy.deepcopy(layers[1]) for _ in range(2)]
    model.base_model.model.model.layers = torch.nn.ModuleList(layers)
    apply_to_model.add_fused(model, Choice("on", "asked for"), RunChecks())
    mlps = len(layers) if how == "mlp" else 0
    apply_to_model.add_activation_checkpointing(
        model, layers, 0, RunChecks(), mlps=mlps, rounded=how == "int8"
    )
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for layer in layers:
        layer.compile(backend="eager")
    gradients(model, 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


H100_80 = Hardware("cuda", "NVIDIA H100 80GB HBM3", 2, (9, 0), 80.0, 2)
A100_80 = Hardware("cuda", "NVIDIA A100-SXM4-80GB", 2, (8, 0), 80.0, 2)


def chosen(gpus: list[Hardware], rooms: list[float]) -> None:
    """On one of two ranks, whose GPUs are others, or have other free memory."""
    from accelerate import PartialState

    rank = PartialState(cpu=True).process_index
    work = compilation.Work(4096, 3e16, host=(8.0, 2.0)[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply_to_model, "free_gib", lambda _: rooms[rank])
        made = apply_to_model.apply(model_of("lora"), Speed(fused=False), work, gpus[rank], RunChecks())
    print("chosen:", made.compile.value, made.checkpointing.value)


@pytest.mark.parametrize(
    ("gpus", "rooms", "said"),
    [
        ([H100_80, H100_80], [80.0, 0.0], "off full"),
        ([H100_80, A100_80], [80.0, 80.0], "off none"),
        ([A100_80, H100_80], [80.0, 80.0], "on none"),
    ],
)
def test_ranks_recompute_alike(gpus: list[Hardware], rooms: list[float], said: str) -> None:
    """By the least memory, and as rank 0's GPU has it: else one would gather split weights once more than the
    other, which never answers."""
    assert two_ranks.run(chosen, gpus, rooms).count(f"chosen: {said}") == 2


def sharded_gradients(half: bool) -> None:
    """On one of two ranks: weights that FSDP2 has split are no memory of a layer until it is called."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    found = []
    for offloaded in (False, True):
        model = model_of("full")
        layers = live_model_spec.decoder_layers(model)
        apply_to_model.add_activation_checkpointing(model, layers, 0 if half else len(layers), RunChecks())
        for module in (*layers, model):
            fully_shard(module)
        if offloaded:
            made = activation_offload.Activations(layers, model.device)
        found.append(gradients(model))
    whole = [(losses, {n: g.full_tensor() for n, g in made.items()}) for losses, made in found]
    assert_same(*whole)
    assert made.out == made.back == 4 and (half or made.tensors == 4)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("half", [False, True])
def test_weights_that_fsdp_splits_stay(half: bool) -> None:
    two_ranks.run(sharded_gradients, half)


def test_a_pass_that_failed_leaves_nothing() -> None:
    model = model_of("lora")
    layers = live_model_spec.decoder_layers(model)
    apply_to_model.add_activation_checkpointing(model, layers, len(layers), RunChecks())
    made = activation_offload.Activations(layers, model.device)
    right = gradients(model)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    hook = layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(model)
    hook.remove()
    made.restart()
    assert_same(right, gradients(model))
    assert made.out == made.back == 4


def test_nothing_in_the_cpu_s_memory_outlives_its_backward() -> None:
    model = model_of("lora")
    layers = live_model_spec.decoder_layers(model)
    apply_to_model.add_activation_checkpointing(model, layers, len(layers), RunChecks())
    made = activation_offload.Activations(layers, model.device)
    kept: list[weakref.ref] = []
    keep = made.keep

    def watched(tensor):
        found = keep(tensor)
        kept.append(weakref.ref(found))
        return found

    made.keep = watched
    ids = batches(model, 1)[0]
    loss = model.train()(input_ids=ids, labels=ids).loss
    entries = [one() for one in kept if isinstance(one(), activation_offload.Kept)]
    first, second = (entry.owner for entry in entries)
    assert second.before() is first and first.before is None
    loss.backward()
    assert all(entry.arriving is None for entry in entries) and not made.leaving
    del entries, loss, first, second
    gc.collect()
    assert not any(isinstance(one(), activation_offload.Kept) for one in kept)


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("speed.offload=activations", 3, "speed.offload: none"),
        ("speed.offload=optimizer", 3, "this machine has none"),
        ("train.optim=paged_adamw_8bit", 3, "adamw_8bit"),
        ("speed.offload=all,speed.activation_checkpointing=none", 2, "speed.activation_checkpointing: auto"),
        ("speed.offload=optimizer,train.optim=adamw_8bit", 2, "torch's AdamW"),
        ("speed.offload=all,adapter.loraplus_lr_ratio=16", 2, "LoRA+ has its own optimizer"),
        ("speed.offload=optimizer,adapter.type=adalora", 2, "masks ranks on the GPU between steps"),
        ("train.optim=galore_adamw,train.optim_target_modules=all-linear", 3, "pip install galore-torch"),
    ],
)
def test_what_can_t_be_had_says_what_can(override: str, code: int, said: str, train, capsys) -> None:
    train(*override.split(","), "data.validation=null", code=code)
    assert said in capsys.readouterr().err


def test_cuda_graphs_are_refused_where_they_can_t_be(tmp_path, capsys) -> None:
    """Torch says nothing on a CPU, and ends the run where a layer is run again in backward."""
    words = [str(QUICKSTART), "speed.compile=reduce-overhead", f"train.output_dir={tmp_path}/run"]
    assert main.main(["train", *words]) == 3
    assert "CUDA graphs need a GPU" in capsys.readouterr().err and not (tmp_path / "run").exists()
    for again in ("full", "full:4"):
        assert main.main(["check", *words, f"speed.activation_checkpointing={again}"]) == 2
        assert "set `speed.activation_checkpointing: mlp`" in capsys.readouterr().err
    assert main.main(["check", *words, "speed.activation_checkpointing=mlp"]) == 0
    assert main.main(["check", *words, "speed.offload=activations"]) == 2
    assert "does not work with offloaded activations" in capsys.readouterr().err
    assert compilation.check_cuda_graphs("max-autotune", "none", "none", "FSDP")
    assert compilation.check_cuda_graphs("max-autotune", "mlp_int8", "activations:4")  # as `auto` may have it
    assert not compilation.check_cuda_graphs("max-autotune", "mlp_int8", "optimizer")
    assert not compilation.check_cuda_graphs("auto", "full", "all")

"""Where fast forwards meet what else a run does: optimizers, recomputation, autocast, other adapters."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.autoconfig import decisions
from finetune.autoconfig.compilation import Work
from finetune.core import upstream_private
from finetune.core.errors import UserError
from finetune.core.run_checks import Choice, RunChecks
from finetune.distributed.launch_environment import sharded
from finetune.hardware.detection import Hardware
from finetune.kernels import ops
from finetune.quantization import fp8_linear, fp8_loading
from finetune.recipe.schema import Speed
from finetune.speed import apply_to_model, fused_lora, live_model_spec, packing_isolation
from finetune.speed.fused_layers import Fused
from finetune.speed.live_model_spec import decoder_layers
from support.fused_models import IDS, LINEAR, TYPES, adapted, ranked, step, worst
from support.launches import H100
from support.runs import metrics, run_checks

CPU = Hardware("cpu", "CPU", 1, (0, 0), 16.0, 2)
WORK = Work(64, 1e9)


def fused_and_not(config: Any, **options: Any) -> tuple[Any, Any]:
    """The same model twice, fused and as PEFT has it."""
    model, own = adapted(config, **options), adapted(config, **options)
    assert not Fused(model, decoder_layers(model)).left
    return model, own


@pytest.mark.soak
def test_dora_learns_what_pefts_does(train) -> None:
    """Through the fused AdamW of every run, which moves weights without counting a version."""
    asked = ("adapter.type=dora", "train.max_steps=6", "train.warmup_steps=0", "train.learning_rate=2e-2")
    runs = [train(*asked, f"speed.fused={on}", name=f"fused-{on}") for on in ("true", "false")]
    fast, own = ([line["loss"] for line in metrics(run)] for run in runs)
    assert fast == pytest.approx(own, abs=2e-4) and fast[0] - fast[-1] > 0.05
    assert run_checks(runs[0])["DoRA norms"]["actual"] == "0 off"


def test_norms_are_made_anew_when_the_optimizer_says_so() -> None:
    model = adapted(TYPES["dora"](), dtype=torch.float32)
    fused = Fused(model, decoder_layers(model))
    assert fused.norms
    step(model)
    before = fused.norms.refreshed
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.optim.AdamW(trained, lr=0.05, fused=True).step()
    fused.norms.refresh()
    if fused.norms.refreshed == before:  # as in torch 2.13
        assert fused.norms.error() > 1e-3
    fused.norms.refresh(stepped=True)
    assert fused.norms.error() < 1e-6
    with torch.no_grad():
        fused.norms.layers[1].lora_B["default"].weight[0] = math.nan
    assert math.isnan(fused.norms.error())


def test_norms_follow_the_scaling() -> None:
    fused, own = fused_and_not(TYPES["dora"]())
    step(fused)
    for model in (fused, own):
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(3.0)
    (loss, gradients), (right, same) = step(fused), step(own)
    assert abs(loss - right) < 1e-10 and worst(gradients, same) < 1e-8


def test_an_mlp_of_experts_is_not_whole_where_what_they_share_is_fused() -> None:
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    for family, extra in (("llama", {}), ("qwen2_moe", sizes)):
        model = adapted(ranked(), family, **extra)
        layers = decoder_layers(model)
        _, spec = apply_to_model.add_fused(model, Choice("on", "auto"), RunChecks())
        assert all(live_model_spec.fused_mlps(layer) for layer in layers)
        assert spec.fused_mlps == (family == "llama")


def test_recomputed_layers_leave_nothing_behind() -> None:
    """Dropout on down_proj makes its product the last that a layer keeps, where checkpointing ends it."""
    model = adapted(ranked(lora_dropout=0.1))
    layers, seen = decoder_layers(model), []
    fused = Fused(model, layers)
    apply_to_model.add_activation_checkpointing(model, layers, len(layers), RunChecks())
    for layer in layers:
        norm = layer.post_attention_layernorm
        norm.register_forward_hook(lambda module, inputs, output: seen.append(weakref.ref(output)))
    step(model)
    gc.collect()
    assert all(stack.x is None and not stack.ready for stack in fused.stacks)
    assert len(seen) == 2 * len(layers) and not any(output() is not None for output in seen)


def recomputed(kind: str, base: str, **how: Any) -> tuple[Any, int, list[Any], str]:
    """Loss and gradients of a step, the bytes saved for backward, the layers, and the run check's text."""
    model, sizes = adapted(TYPES[kind](), dtype=torch.float32, base=base), dict[int, int]()
    layers = decoder_layers(model)
    assert Fused(model, layers).mlps == len(layers)
    apply_to_model.add_activation_checkpointing(model, layers, 0, checks := RunChecks(), **how)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = step(model)
    return made, sum(sizes.values()), layers, str(checks.entries[-1].actual)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("base", ["plain", "fp8", "nf4"])
def test_an_mlp_s_first_half_made_again_changes_nothing(kind: str, base: str) -> None:
    (loss, gradients), whole, layers, _ = recomputed(kind, base)
    (again, same), less, *_ = recomputed(kind, base, mlps=len(layers))
    assert loss == again and all(map(torch.equal, gradients.values(), same.values()))
    up = layers[0].mlp.up_proj
    more = up.in_features if kind == "ia3" else 0  # which keeps no input otherwise
    assert whole - less >= len(layers) * IDS.numel() * (2 * up.out_features - more) * 4


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("base", ["plain", "fp8", "nf4"])
def test_an_mlp_s_first_half_kept_in_int8(kind: str, base: str) -> None:
    """The same loss; gradients a hundredth off; half of the memory, and a 32nd of it for scales."""
    (loss, gradients), whole, layers, _ = recomputed(kind, base)
    (same, rough), less, _, said = recomputed(kind, base, rounded=True)
    assert loss == same and 1e-5 < worst(gradients, rough) < 0.02
    assert f"{len(layers)} MLPs in int8" in said
    both = len(layers) * IDS.numel() * 2 * layers[0].mlp.up_proj.out_features  # blocks of 128, here of 32
    assert whole - less == both * (4 - 1 - 4 / math.gcd(layers[0].mlp.up_proj.out_features, 128))


def test_rounding_to_int8_and_back() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 768, dtype=torch.bfloat16) * torch.logspace(-3, 3, 7, dtype=torch.bfloat16)[:, None]
    x[2, :128], x[4, 5], x[5, 200] = 0.0, float("nan"), float("inf")
    codes, scale = ops.compress(x)
    assert codes.dtype == torch.int8 and codes.shape == x.shape and scale.shape == (7, 6)
    back = ops.expand(codes, scale, torch.float32).view(7, 6, 128)
    blocks, whole = x.float().view(7, 6, 128), torch.ones(7, 6, dtype=torch.bool)
    whole[4, 0] = whole[5, 1] = False  # a block that holds NaN or infinity is NaN, as what is made of it
    assert back[~whole].isnan().all() and back[whole].isfinite().all() and not back[2, 0].any()
    off, largest = (back - blocks)[whole].abs().amax(-1), blocks[whole].abs().amax(-1)
    assert (off <= largest / 254 * 1.001).all()
    near = back[whole].norm() / blocks[whole].norm()
    assert abs(float(near) - 1) < 1e-3
    for number in (96, 172):  # 128 does not divide a half of them
        assert ops.compress(torch.ones(2, number))[1].shape == (2, number // math.gcd(number // 2, 128))


def test_float32_hidden_states_under_autocast() -> None:
    """A norm that trains is kept in float32, and so is what it gives."""
    both = []
    for model in fused_and_not(ranked(), dtype=torch.bfloat16):
        for layer in decoder_layers(model):
            layer.input_layernorm.float()
            layer.post_attention_layernorm.float()
        with torch.autocast("cpu", torch.bfloat16):
            both.append(step(model))
    assert abs(float(both[0][0] - both[1][0])) < 0.02
    fast, own = (torch.cat([g.flatten() for g in one[1].values()]) for one in both)
    assert float((fast - own).norm() / own.norm()) < 0.05


def test_a_proof_compiles_nothing() -> None:
    model = adapted(TYPES["dora"](), dtype=torch.float32)
    Fused(model, decoder_layers(model))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder_layers(model):
        layer.compile(backend="aot_eager")
    packing_isolation.prove_apart(model, 16, "sdpa", checks := RunChecks())
    assert model.training and checks.entries[-1].passed
    assert not torch._dynamo.utils.counters["stats"] and not torch._dynamo.utils.counters["graph_break"]


def test_every_layer_may_have_a_graph_of_its_own() -> None:
    model = adapted(TYPES["lora"](), num_hidden_layers=3)
    before = torch._dynamo.config.recompile_limit
    with upstream_private.compile_settings():
        apply_to_model.apply(model, Speed(compile=True), WORK, CPU, RunChecks())
        assert torch._dynamo.config.recompile_limit >= 14
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.parametrize("targets", [["up_proj"], ["gate_proj", "down_proj"], ["k_proj", "up_proj"]])
def test_dropout_where_a_neighbour_has_no_adapter(targets: list[str]) -> None:
    model = adapted(LoraConfig(r=4, target_modules=targets, lora_dropout=0.1))
    fused = Fused(model, decoder_layers(model))
    assert fused.served and not fused.left


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_a_bias_that_trains_is_pefts(bias: Any) -> None:
    model, own = (adapted(ranked(bias=bias), family="qwen2") for _ in range(2))
    fused = Fused(model, decoder_layers(model))
    assert fused.left == {"the base weights train": 6}  # q, k and v of two layers
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert abs(float(loss - right)) < 1e-10 and worst(gradients, theirs) < 1e-10


@pytest.mark.parametrize(("family", "chosen"), [("jetmoe", "norms"), ("llama", "full")])
def test_auto_recomputes_layers_only_where_transformers_can(family: str, chosen: str) -> None:
    made = AutoConfig.for_model(family, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    spec = decisions.ModelSpec(made, layers=2, adapted=True, dtype="bfloat16")
    work = WORK._replace(tokens=100_000, usable=0.01)
    fused = Choice("off", "no adapter")
    decided = decisions.decide(spec, Speed(), work, H100, fused)
    assert decided.checkpointing.value == chosen
    assert (f"no activation checkpointing for {family}" in decided.checkpointing.reason) is (
        family == "jetmoe"
    )


def test_layers_that_are_not_found() -> None:
    made = AutoConfig.for_model("falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(made)
    assert decoder_layers(model) == []
    chosen = apply_to_model.apply(model, Speed(), WORK, CPU, RunChecks())
    assert chosen.compile.reason == "finetune does not know the decoder layers of falcon"
    with pytest.raises(UserError) as error:
        apply_to_model.apply(
            model, Speed(compile=True, activation_checkpointing="full"), WORK, CPU, RunChecks()
        )
    assert [problem.where or problem.key for problem in error.value.problems] == [
        "speed.compile",
        "speed.activation_checkpointing",
    ]


def test_a_model_that_clips_in_place_is_left() -> None:
    model = adapted(LoraConfig(r=4, target_modules=LINEAR), family="olmo", clip_qkv=0.5)
    fused = Fused(model, decoder_layers(model))
    assert fused.left == {"the model clips q, k and v in place": 14} and fused.served == 0
    step(model)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("where", ["all-linear", ["q_proj"]], ids=["everywhere", "in fewer layers"])
def test_another_adapter_runs_by_peft(kind: str, where: Any) -> None:
    model, own = fused_and_not(TYPES[kind]())
    for one in (model, own):
        torch.manual_seed(1)
        one.add_adapter("other", LoraConfig(r=3, target_modules=where, init_lora_weights=False))
        one.set_adapter("other")
        one.double()
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert float(loss - right) == 0.0 and gradients.keys() == theirs.keys()
    for one in (model, own):
        one.set_adapter("default")
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert float(loss - right) == pytest.approx(0, abs=1e-10) and worst(gradients, theirs) < 1e-10


@pytest.mark.filterwarnings(
    "ignore:Unmerge result can be inaccurate:UserWarning"
)  # PEFT says it of every IA3
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_merged_and_taken_out_again_it_trains_on_the_weights_that_are_there(kind: str, safe: bool) -> None:
    """PEFT then has other tensors for them, a little off what they were."""
    model, own = adapted(TYPES[kind]()), adapted(TYPES[kind]())
    fused = Fused(model, decoder_layers(model))
    for one in (model, own):
        one.merge_adapter(safe_merge=safe)
        one.unmerge_adapter()
        for name, parameter in one.named_parameters():
            if "base_layer.weight" in name:
                parameter.data = parameter.data * 1.5  # more than rounding is
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert float(loss - right) == pytest.approx(0, abs=1e-10) and worst(gradients, theirs) < 1e-10
    assert not fused.norms or fused.norms.error() < 1e-10
    for stack in fused.stacks:
        for layer in stack.layers:
            held, base = (
                stack.stored[0].untyped_storage(),
                fused_lora.base_layer_of(layer).weight.untyped_storage(),
            )
            assert held.data_ptr() == base.data_ptr()


@pytest.mark.parametrize("base", ["plain", "fp8"])
def test_a_disabled_adapter_leaves_the_base_also_in_training(base: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
    model, own = fused_and_not(config, dtype=torch.float32, base=base)
    with model.disable_adapter(), own.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, own(input_ids=IDS).logits)


def test_the_same_input_twice_and_without_gradient() -> None:
    model, _ = fused_and_not(ranked())
    attends = decoder_layers(model)[0].self_attn
    x = torch.randn(3, 64, dtype=torch.float64)
    first, again = attends.q_proj(x), attends.q_proj(x)
    assert torch.equal(first, again)
    with torch.no_grad():
        attends.q_proj(x)
    assert attends.k_proj(x).requires_grad


def test_sharded_weights_are_not_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharded() == "FSDP"
    model = adapted(ranked())
    spec = live_model_spec.live_model_spec(model)
    chosen = decisions.decide_fused(spec, "auto", CPU, sharded())
    assert chosen.value == "off" and "FSDP shards the weights" in chosen.reason
    with pytest.raises(UserError, match="FSDP shards the weights"):
        decisions.decide_fused(spec, True, CPU, sharded())


@pytest.mark.parametrize(("fused", "count"), [(False, 7), (True, 4)])
def test_fp8_products_of_a_forward_are_counted(fused: bool, count: int, monkeypatch) -> None:
    """q, k, v as one, and gate and up; the run check on a GPU expects as many GEMMs."""
    model = adapted(ranked(), dtype=torch.float32, base="fp8")
    layers = decoder_layers(model)
    if fused:
        Fused(model, layers)
    ran, own = [0], fp8_linear.product

    def counting(*given: Any) -> torch.Tensor:
        ran[0] += 1
        return own(*given)

    monkeypatch.setattr(fp8_linear, "product", counting)
    with torch.no_grad():
        model(input_ids=IDS)
    assert fp8_loading.products(layers) == ran[0] == count * len(layers)


@pytest.mark.parametrize("place", ["product", "input_gradient"])
def test_a_kernel_that_does_not_fit_leaves_the_layer_to_peft(place: str, monkeypatch) -> None:
    """In forward or in backward, whose tiles may want more of a GPU's shared memory than it has."""

    def too_large(*given: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    model = adapted(ranked(), dtype=torch.float32)
    loss, gradients = step(model)
    with monkeypatch.context() as patch:
        patch.setattr(fused_lora, place, too_large)
        fused = Fused(model, decoder_layers(model))
    (reason,) = fused.left
    assert "fails here: out of resource" in reason and (fused.served, fused.left[reason]) == (0, 14)
    ours, our_gradients = step(model)
    assert torch.equal(ours, loss) and worst(our_gradients, gradients) == 0

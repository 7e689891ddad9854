"""Stacked experts by our own forward against transformers' and PEFT's: the same in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from finetune.autoconfig.decisions import decide_fused
from finetune.core.run_checks import Choice, RunChecks
from finetune.hardware.detection import Hardware
from finetune.kernels import expert_ops, kernel_limits
from finetune.models import module_names
from finetune.speed import apply_to_model, fused_adapters, fused_experts, live_model_spec
from finetune.speed.fused_layers import Fused
from finetune.speed.live_model_spec import decoder_layers
from support.architectures import CONFIGS
from support.fused_models import IDS, SIZES, step, worst
from support.soak import soak_except

ENDS = ["experts.gate_up_proj", "experts.down_proj"]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
H100 = Hardware("cuda", "NVIDIA H100", 1, (9, 0), 80.0, 8)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXACT = 1e-9


def mixture(
    family: str = "qwen3_moe",
    parameters: Any = BOTH,
    *,
    sizes: Any = None,
    dtype: Any = torch.float64,
    **options: Any,
) -> Any:
    """A tiny PEFT model with experts whose adapters are not zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(sizes or {**SIZES, **EXPERTS, "eos_token_id": 1}))
    # transformers' grouped GEMM on the CPU has no float64
    whole = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    given = {"r": 5, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], **options}
    model = get_peft_model(
        whole, LoraConfig(target_parameters=parameters, **given), autocast_adapter_dtype=False
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype) + 0.1 * torch.randn(parameter.shape, dtype=dtype)
    return model.train()


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "finetune_experts")]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize(
    "parameters", [BOTH, BOTH[:1], BOTH[1:], None], ids=["both", "first", "last", "frozen"]
)
@pytest.mark.parametrize("rslora", [False, True])
def test_loss_and_gradients_are_pefts(family: str, parameters: Any, rslora: bool) -> None:
    """The router's weight, too, gets the gradient that it has in transformers' forward."""
    model = mixture(family, parameters, use_rslora=rslora)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            parameter.requires_grad_()
    loss, gradients = step(model)
    fused = Fused(model, decoder_layers(model))
    ours, our_gradients = step(model)
    assert len(fused.experts.served) == 2 and not fused.left and not fused.experts.left
    assert fused.summary() == "6 linear layers; experts of 2 of 2 layers"
    assert any("gate.weight" in name for name in gradients)
    assert abs(float(ours - loss)) < EXACT
    assert worst(our_gradients, gradients) < EXACT


SERVED = [
    "qwen2_moe", "granitemoe", "phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "jamba",
    "qwen3_next", "minimax", "granitemoehybrid", "glm4_moe_lite",
]  # fmt: skip


@pytest.mark.parametrize("family", soak_except(["granitemoe", "deepseek_v3", "jamba"], SERVED))
def test_families(family: str) -> None:
    """Shared experts, dense first layers, sigmoid routers, layers of other kinds."""
    calm = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0} if family == "phimoe" else {}
    model = mixture(family, ENDS, sizes=CONFIGS[family] | calm, target_modules=r".*self_attn\.\w+_proj")
    loss, gradients = step(model)
    fused = Fused(model, decoder_layers(model))
    ours, our_gradients = step(model)
    assert fused.experts.served and not fused.experts.left
    assert abs(float(ours - loss)) < EXACT
    assert worst(our_gradients, gradients) < EXACT


@pytest.mark.parametrize(
    "family", sorted({*SERVED, "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v4", "lfm2_moe"})
)
def test_a_plan_knows_which_experts_are_served(family: str) -> None:
    config = AutoConfig.for_model(family, **CONFIGS[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    found = [one for layer in decoder_layers(model) for one in fused_experts.stacked(layer)]
    planned = kernel_limits.experts_unsupported_reason(config, module_names.of_model(model).shapes)
    assert found and {bool(fused_experts.unsupported_reason(*one)) for one in found} == {bool(planned)}
    assert bool(planned) == (family in ("gpt_oss", "deepseek_v4", "lfm2_moe"))


def test_a_model_without_stacked_experts_has_none_to_serve() -> None:
    config = AutoConfig.for_model("llama", **CONFIGS["llama"])
    assert kernel_limits.experts_unsupported_reason(config, {"model.layers.0.mlp.down_proj.weight": (4, 4)})


ROUTES = {
    "an expert with no token": lambda ids: ids.clamp(min=1),
    "one expert with all": lambda ids: torch.zeros_like(ids),
    "the last expert alone": lambda ids: torch.full_like(ids, 4),
    "any": lambda ids: ids,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("tokens", "each"), [(1, 1), (70, 1), (100, 3), (128, 2)])
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_corners_of_routing(route: str, tokens: int, each: int, act: str) -> None:
    """Output and the gradients of input, routing weights and adapters, where tiles are empty or not full."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=16, moe_intermediate_size=12, num_experts=5, hidden_act=act,
        experts_implementation="eager",
    )  # fmt: skip
    module: Any = Qwen3MoeExperts(config).double().requires_grad_(False)
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape))
    holder = torch.nn.ModuleDict({"experts": module})
    model = get_peft_model(holder, LoraConfig(r=3, target_modules=[], target_parameters=ENDS))
    wrapper: Any = holder["experts"]
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    x = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, each, dtype=torch.float64, requires_grad=True)
    ids, ahead = ROUTES[route](torch.rand(tokens, 5).topk(each).indices), torch.randn(tokens, 16).double()

    def run() -> list[torch.Tensor]:
        y = wrapper(x, ids, weights)
        return [y, *torch.autograd.grad(y, [x, weights, *trained], ahead)]

    own = run()
    ((found, wrappers),) = fused_experts.stacked(holder)
    fused_experts.Experts(found, wrappers, [])
    fused_experts.ExpertsInterface.register(fused_experts.NAME, fused_experts.experts_forward)
    found.config._experts_implementation = fused_experts.NAME
    for ours, right in zip(run(), own, strict=True):
        assert (ours - right).detach().norm() <= EXACT * right.detach().norm()


def test_every_row_is_in_one_tile_of_its_expert() -> None:
    torch.manual_seed(0)
    for tokens, each, count in ((1, 1, 1), (64, 1, 3), (65, 2, 4), (300, 4, 7), (129, 1, 40_000)):
        ids = torch.rand(tokens, min(count, 50)).topk(each).indices * (count // min(count, 50))
        order, places, ends, tiles = expert_ops.sort_by_expert(ids, count)
        rows = tokens * each
        assert torch.equal(order.sort().values, torch.arange(rows, dtype=torch.int32))
        assert torch.equal(places[order.long()], torch.arange(rows, dtype=torch.int32))
        assert ends.tolist() == [int((ids <= expert).sum()) for expert in range(count)]
        experts = ids.flatten()[order.long()]
        covered = [row for _, first, end in tiles.tolist() for row in range(first, end)]
        assert sorted(covered) == list(range(rows)) and len(tiles) == rows // expert_ops.TILE + count
        for expert, first, end in tiles.tolist():
            assert end - first <= expert_ops.TILE and (experts[first : max(first, end)] == expert).all()


def test_names_state_and_evaluation_stay() -> None:
    model = mixture()
    keys, saved = list(model.state_dict()), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        tuned = model.eval()(input_ids=IDS).logits
        with model.disable_adapter():
            base = model(input_ids=IDS).logits
    fused = Fused(model.train(), decoder_layers(model))
    assert list(model.state_dict()) == keys
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, tuned)
        with model.disable_adapter():
            assert torch.equal(model(input_ids=IDS).logits, base)
            assert torch.allclose(model.train()(input_ids=IDS).logits, base, atol=1e-10)
    model.base_model.merge_adapter()
    with torch.no_grad():
        assert torch.allclose(model.train()(input_ids=IDS).logits, tuned, atol=1e-10)
    model.base_model.unmerge_adapter()
    with torch.no_grad():
        assert torch.allclose(model(input_ids=IDS).logits, tuned, atol=1e-10)
    assert fused.experts.worst < 1e-12


def test_another_adapter_runs_by_peft() -> None:
    model, own = mixture(), mixture()
    Fused(model, decoder_layers(model))
    for one in (model, own):
        torch.manual_seed(1)
        one.add_adapter(
            "other",
            LoraConfig(r=3, target_modules=["q_proj"], target_parameters=BOTH, init_lora_weights=False),
        )
        one.double().set_adapter("other")
        one.train()
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert abs(float(loss - right)) < EXACT and worst(gradients, theirs) < EXACT


def test_base_weights_of_experts_that_train_later_get_their_gradients() -> None:
    fused, own = mixture(), mixture()
    fused_adapters.apply(fused)
    step(fused)
    for model in (fused, own):
        for name, weight in model.named_parameters():
            if "experts" in name and "lora" not in name:
                weight.requires_grad_(True)
        model.zero_grad()
    (loss, gradients), (right, theirs) = step(fused), step(own)
    assert gradients.keys() == theirs.keys()
    assert [name for name in theirs if name.endswith("experts.base_layer.base_layer.down_proj")]
    assert abs(float(loss - right)) < 1e-5 and worst(gradients, theirs) < 1e-4


def test_removed_it_is_as_it_was() -> None:
    model, own = mixture(), mixture()
    fused_adapters.apply(model)
    experts, before = experts_of(model), own.base_model.model.get_experts_implementation()
    assert (
        model.base_model.model.get_experts_implementation() == {"": fused_experts.NAME} and len(experts) == 2
    )
    held = [module.gate_up_proj.untyped_storage().nbytes() for module in experts]
    fused_adapters.remove(model)
    assert model.base_model.model.get_experts_implementation() == before
    assert not experts_of(model)
    for module, more in zip(experts, held, strict=True):
        weights = [module.gate_up_proj, module.down_proj]
        assert all(one.is_contiguous() and one.untyped_storage().nbytes() == one.nbytes for one in weights)
        assert module.gate_up_proj.nbytes < more
    assert not [m for m in model.modules() if "forward" in vars(m) or "finetune_before" in vars(m)]
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert loss == right and worst(gradients, theirs) == 0.0


def test_the_optimizer_is_followed_and_passes_may_come_before_a_backward() -> None:
    """A fused AdamW moves weights without counting a version; two losses may be added."""
    curves = []
    for fast in (False, True):
        model = mixture(dtype=torch.float32)
        if fast:
            Fused(model, decoder_layers(model))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, fused=True)
        losses = []
        for _ in range(4):
            one, other = (model(input_ids=i, labels=i, use_cache=False).loss for i in (IDS, IDS.flip(1)))
            loss = one + other
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4) and curves[0][0] - curves[0][-1] > 0.1


def test_a_recomputed_layer_gives_the_same() -> None:
    model = mixture()
    layers = decoder_layers(model)
    Fused(model, layers)
    loss, gradients = step(model)
    apply_to_model.add_activation_checkpointing(model, layers, len(layers), RunChecks())
    again, same = step(model)
    assert loss == again and worst(same, gradients) < 1e-12


@pytest.mark.parametrize("parameters", [BOTH, None], ids=["both", "frozen"])
def test_compiled_layers_have_no_break(parameters: Any) -> None:
    """PEFT's own forward of experts' adapters breaks the graph."""
    model = mixture(parameters=parameters)
    if parameters:
        assert live_model_spec.breaking(model) == {"experts' adapters"}
    Fused(model, decoder_layers(model))
    assert not live_model_spec.breaking(model)
    model.get_base_model().enable_input_require_grads()
    loss, gradients = step(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        for layer in decoder_layers(model):
            layer.compile(backend="aot_eager", fullgraph=True)
        ours, our_gradients = step(model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # of both layers
    finally:
        torch._dynamo.reset()
    assert abs(float(ours - loss)) < EXACT and worst(our_gradients, gradients) < EXACT


def test_what_is_not_served_says_why() -> None:
    model = mixture("gpt_oss", None, sizes=CONFIGS["gpt_oss"])
    fused = Fused(model, decoder_layers(model))
    said = "experts of 0 of 2 layers; 2 by transformers: the experts have a bias, no gate"
    assert said in fused.summary() and not experts_of(model)
    model = mixture(r=200, parameters=BOTH[:1])
    fused = Fused(model, decoder_layers(model))
    assert "rank 200 is larger than 128" in fused.summary() and live_model_spec.breaking(model) == {
        "experts' adapters"
    }


def test_an_adapter_of_other_layers_leaves_experts_to_peft() -> None:
    model = mixture()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("other")
    left = fused_experts.FusedExperts(model, decoder_layers(model), []).left
    assert list(left) == ["they have no weights of the active adapter other"]


def test_experts_that_compute_another_thing_keep_their_own_forward(monkeypatch) -> None:
    model, own = mixture(), mixture()
    monkeypatch.setitem(fused_experts.ACTIVATIONS, "SiLUActivation", "gelu_tanh")
    fused = Fused(model, decoder_layers(model))
    assert not fused.experts.served and dict(fused.experts.left) == {
        "their fused forward differs from their own": 2
    }
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert loss == right and worst(gradients, theirs) < EXACT


def test_experts_alone_are_something_to_fuse() -> None:
    """An adapter whose layers have forwards of their own leaves the experts, most of a step."""
    model = mixture(parameters=BOTH, target_modules=[])
    spec = live_model_spec.live_model_spec(model)
    chosen = decide_fused(spec, True, H100)
    assert chosen.value == "on"
    chosen, spec = apply_to_model.add_fused(model, Choice("on", "auto"), checks := RunChecks())
    assert chosen.value == "on" and "experts of 2 of 2 layers" in chosen.reason and not spec.breaks
    assert "experts of 2 of 2 layers" in checks.entries[-1].actual

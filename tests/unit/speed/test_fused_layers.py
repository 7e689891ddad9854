"""The fast forwards against PEFT's own: the same loss and gradients in float64, for every type and family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig

from finetune.core.run_checks import Choice, RunChecks
from finetune.quantization import fp8_linear
from finetune.speed import apply_to_model
from finetune.speed.fused_layers import Fused
from finetune.speed.live_model_spec import decoder_layers
from support.fused_models import IDS, LINEAR, TYPES, adapted, ranked, step, worst
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {"plain": torch.float64, "nf4": torch.float32, "fp4": torch.float32}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("base", "exact"), [("plain", 1e-10), ("nf4", 1e-4)])
def test_loss_and_gradients_are_pefts(kind: str, base: str, exact: float) -> None:
    model = adapted(TYPES[kind](), dtype=DTYPES[base], base=base)
    loss, gradients = step(model)
    fused = Fused(model, decoder_layers(model))
    ours, our_gradients = step(model)
    assert fused.served == {"attention only": 6, "ia3": 12}.get(kind, 14)  # with IA3, o_proj has no adapter
    assert not fused.left
    assert abs(float(ours - loss)) < exact
    assert worst(our_gradients, gradients) < exact


FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": {},  # q, k and v have biases
    "qwen3": {},
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh"},
    "phi3": {},  # q, k, v in one layer, gate and up in one
    "phi": {},  # an MLP without a gate; biases
}


@pytest.mark.parametrize(
    ("dora", "base", "exact"),
    [(False, "plain", 1e-10), (True, "plain", 1e-10), (True, "fp4", 1e-4)],
    ids=["lora", "dora", "qdora"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, dora: bool, base: str, exact: float) -> None:
    model = adapted(ranked(use_dora=dora), family, DTYPES[base], base, **FAMILIES[family])
    loss, gradients = step(model)
    fused = Fused(model, decoder_layers(model))
    ours, our_gradients = step(model)
    assert fused.served == {"phi3": 8, "phi": 12}.get(family, 14)
    assert abs(float(ours - loss)) < exact
    assert worst(our_gradients, gradients) < exact


def test_experts_are_left_to_peft() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = LoraConfig(r=4, target_modules=LINEAR[:4])
    model = adapted(config, "qwen3_moe", torch.float32, **sizes)  # its experts have no float64
    loss, gradients = step(model)
    fused = Fused(model, decoder_layers(model))
    ours, our_gradients = step(model)
    assert fused.served == 8
    assert abs(float(ours - loss)) < 1e-5
    assert worst(our_gradients, gradients) < 1e-4


@pytest.mark.parametrize("base_stored", ["plain", "nf4"])
# PEFT says that merging rounds a 4-bit base anew, as it does (peft 0.21.2, tuners/lora/bnb.py)
@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit")
def test_names_state_and_the_base_alone_stay(base_stored: str) -> None:
    model = adapted(TYPES["lora"](), dtype=torch.float32, base=base_stored)
    keys, trained = list(model.state_dict()), step(model)[0]
    with torch.no_grad(), model.disable_adapter():
        base = model.eval()(input_ids=IDS).logits
    with torch.no_grad():
        tuned = model(input_ids=IDS).logits
    Fused(model.train(), decoder_layers(model))
    assert list(model.state_dict()) == keys
    assert abs(float(step(model)[0] - trained)) < 1e-5
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, base)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, tuned)  # out of training it is PEFT's forward
    merged, own = (
        one.eval().merge_and_unload()
        for one in (model, adapted(TYPES["lora"](), dtype=torch.float32, base=base_stored))
    )
    with torch.no_grad():
        logits = merged(input_ids=IDS).logits
        assert torch.allclose(logits, own(input_ids=IDS).logits, atol=1e-4)
        assert base_stored == "nf4" or torch.allclose(logits, tuned, atol=1e-4)


def test_a_second_adapter_runs_by_peft() -> None:
    model = adapted(TYPES["lora"]())
    Fused(model, decoder_layers(model))
    model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    model.double()
    both = model.base_model
    both.set_adapter(["default", "other"])
    loss = step(model)[0]
    for layer in decoder_layers(model):
        for module in layer.modules():
            vars(module).pop("forward", None)
    assert float(step(model)[0] - loss) == 0.0


def test_norms_follow_the_weights() -> None:
    """They are made anew when A or B has moved, however it was moved, and not else."""
    model = adapted(TYPES["dora"]())
    fused = Fused(model, decoder_layers(model))
    assert fused.norms
    step(model)
    made = fused.norms.refreshed
    step(model)
    assert fused.norms.refreshed == made
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.zero_grad()
    ours, gradients = step(model)
    assert fused.norms.refreshed == made + 14
    for layer in decoder_layers(model):
        for module in layer.modules():
            vars(module).pop("forward", None)
    theirs, their_gradients = step(model)
    assert abs(float(ours - theirs)) < 1e-10
    assert worst(gradients, their_gradients) < 1e-10


@pytest.mark.parametrize(
    ("family", "targets", "mlps"),
    [
        ("llama", "all-linear", 0),
        ("llama", LINEAR[:6], 2),
        ("phi3", "all-linear", 0),
        ("phi3", ["qkv_proj", "gate_up_proj"], 2),  # gate and up are one layer: they share a mask
    ],
)
def test_dropout_drops_what_pefts_drops(family: str, targets: Any, mlps: int) -> None:
    """By the same seed: each layer draws a mask of its own for the adapter's input alone."""
    config = LoraConfig(r=5, lora_alpha=16, target_modules=targets, lora_dropout=0.3)
    model = adapted(config, family)
    torch.manual_seed(1)
    loss, gradients = step(model)
    fused = Fused(model, decoder_layers(model))
    assert (fused.mlps, fused.parts.total()) == (mlps, 2 - mlps)
    torch.manual_seed(1)
    ours, our_gradients = step(model)
    assert abs(float(ours - loss)) < 1e-10 and worst(our_gradients, gradients) < 1e-10
    checks = RunChecks()
    again = adapted(config, family)
    chosen, spec = apply_to_model.add_fused(again, Choice("on", "auto"), checks)
    assert spec.fused_mlps == bool(mlps)
    assert ("2 MLPs partly fused: down_proj has lora_dropout" in chosen.reason) == (not spec.fused_mlps)


@pytest.mark.parametrize("kind", ["lora", "dora", "adalora", "ia3"])
def test_on_fp8_they_are_pefts_to_its_rounding(kind: str) -> None:
    """PEFT's own forward on the same codes: what differs is which sums are rounded to fp8."""
    model = adapted(TYPES[kind](), dtype=torch.float32, base="fp8")
    loss, gradients = step(model)
    fused = Fused(model, decoder_layers(model))
    ours, our_gradients = step(model)
    assert fused.served and abs(float(ours - loss)) < 1e-3 * float(loss)
    assert worst(our_gradients, gradients) < 0.05


@pytest.mark.parametrize("training", [False, True])
def test_without_the_adapter_the_base_s_output_is_its_own_in_layers_that_have_none(training: bool) -> None:
    config = LoraConfig(r=4, target_modules=LINEAR, layers_to_transform=[0])
    model = adapted(config, dtype=torch.float32)
    for layer in decoder_layers(model):  # codes in the second too, which has no adapter
        for module in layer.modules():
            for name, inside in list(module.named_children()):
                if type(inside) is torch.nn.Linear and name != "default":  # an adapter's
                    setattr(module, name, fp8_linear.Fp8Linear.of(inside))
    model.train(training)
    with torch.no_grad(), model.disable_adapter():
        base = model(input_ids=IDS).logits
    fused = Fused(model, decoder_layers(model))
    assert fused.mlps == 2
    model.train(training)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, base)


@pytest.mark.parametrize(
    ("kind", "base"),
    soak_except(
        [("lora", "plain"), ("ia3", "fp8")],
        [
            *((kind, "plain") for kind in ("lora", "dora", "adalora", "ia3")),
            *(
                (kind, base) for base in ("fp8", "nf4") for kind in ("dora", "ia3")
            ),  # which reads the weights, or not
        ],
    ),
)
def test_compiled_whole_and_once_for_all_layers(kind: str, base: str) -> None:
    """No graph break (fullgraph), and two graphs: the first layer's input has no gradient."""
    model = adapted(TYPES[kind](), dtype=torch.float32, base=base, num_hidden_layers=4)
    Fused(model, decoder_layers(model))
    loss, gradients = step(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, backend="aot_eager")
    ours, our_gradients = step(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert abs(float(ours - loss)) < 1e-5
    assert worst(our_gradients, gradients) < 1e-4


def test_an_mlp_that_is_not_its_own_forward_is_refused_and_its_layers_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from finetune.speed import fused_layers

    model = adapted(TYPES["lora"]())
    loss, gradients = step(model)
    monkeypatch.setitem(fused_layers.ACTIVATIONS, "SiLUActivation", "gelu_tanh")
    fused = Fused(model, decoder_layers(model))
    ((reason, count),) = fused.parts.items()
    assert "the fused forward differs from PEFT's own" in reason and count == 2
    assert (fused.served, fused.mlps, dict(fused.left)) == (14, 0, {})
    assert not any("forward" in vars(layer.mlp) for layer in decoder_layers(model))
    assert all("forward" in vars(layer.mlp.down_proj) for layer in decoder_layers(model))
    ours, our_gradients = step(model)
    assert abs(float(ours - loss)) < 1e-10 and worst(our_gradients, gradients) < 1e-10


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: ranked(use_dora=True, lora_dropout=0.1), "DoRA with dropout"),
        (lambda: LoraConfig(r=300, target_modules=LINEAR), "rank 300 is larger than 256"),
    ],
)
def test_what_is_left_has_its_reason(config: Callable[[], Any], reason: str) -> None:
    model = adapted(config())
    fused = Fused(model, decoder_layers(model))
    assert fused.served == 0
    ((said, count),) = fused.left.items()
    assert reason in said
    assert count == 14

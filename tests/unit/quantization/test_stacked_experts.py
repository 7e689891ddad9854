"""Quantized experts of a mixture: loading, values, and steps against the dequantized model in PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import api
from finetune.core.errors import UserError
from finetune.kernels import expert_ops, kernel_limits
from finetune.models import module_names
from finetune.quantization import stacked_experts
from finetune.quantization.bnb_loading import EightBitConfig, FourBitConfig
from finetune.quantization.fp8_loading import Fp8BaseConfig
from finetune.speed import fused_experts
from finetune.speed.live_model_spec import decoder_layers
from support.architectures import CONFIGS as TINY
from support.expert_families import BY_TYPE, config_of
from support.fused_models import IDS, step, worst

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16, "eos_token_id": 1, "router_aux_loss_coef": 0.0,
}  # fmt: skip
BOTH = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
CONFIGS: dict[str, Any] = {
    "nf4": lambda: FourBitConfig(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": lambda: FourBitConfig(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "fp8": Fp8BaseConfig,
    "int8": EightBitConfig,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES))
    path = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(path)
    return path


def load(folder: Path, storage: str) -> Any:
    """Load the model quantized as `storage`. Linear layers of LLM.int8() can't compute in float64."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CONFIGS[storage]()
    )


@pytest.mark.parametrize("storage", ["nf4", "fp4"])
def test_four_bit_values_are_bitsandbytes_own(storage: str) -> None:
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    values = stacked_experts.quantize(weight, storage)
    packed, state = quantize_4bit(weight.view(-1, 64), compress_statistics=True, quant_type=storage)
    assert torch.equal(values.view(-1), packed.view(-1))
    assert torch.equal(values.dequantize_by(values), dequantize_4bit(packed, state).view(weight.shape))


@pytest.mark.parametrize(("storage", "error"), [("nf4", 0.11), ("fp4", 0.16), ("fp8", 0.03), ("int8", 0.01)])
def test_dequantized_weights_are_close(storage: str, error: float) -> None:
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    values = stacked_experts.quantize(weight, storage)
    again = values.dequantize_by(values)
    assert again.shape == weight.shape and again.dtype == weight.dtype
    assert float((again - weight).norm() / weight.norm()) < error
    below, behind = torch.randn(3, 16, 64), torch.randn(3, 8, 16)
    stored = values.dequantize_by.stored(values)
    under = expert_ops.dequantize_experts(stored, below, True, torch.float32)
    beside = expert_ops.dequantize_experts(stored, behind, False, torch.float32)
    assert torch.equal(under, torch.cat([again, below], 1)) and torch.equal(
        beside, torch.cat([again, behind], 2)
    )


@pytest.mark.parametrize("storage", CONFIGS)
def test_loaded_experts_are_quantized(folder: Path, storage: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load(folder, storage)
    assert len(stacked_experts.all_of(model)) == 4
    held, whole = stacked_experts.sizes(model)
    assert whole == 2 * 2 * 4 * 3 * 32 * 64 and held < whole * (0.4 if "4" in storage else 0.6)
    own, live = module_names.of_model(plain), module_names.of_model(model)
    assert own.shapes.keys() == live.shapes.keys() and own.kinds == live.kinds
    experts = [name for name in own.shapes if ".experts." in name]
    assert {name: own.shapes[name] for name in experts} == {name: live.shapes[name] for name in experts}
    for name in experts:
        right, read = plain.get_parameter(name).detach(), attribute(model, name)
        assert float((read - right).norm() / right.norm()) < 0.16


def attribute(model: Any, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def adapted(base: Any, parameters: list[str] | None) -> Any:
    config = LoraConfig(r=5, lora_alpha=7, target_modules=["q_proj", "v_proj"], target_parameters=parameters)
    torch.manual_seed(1)
    with stacked_experts.plain_parameters(base):
        model = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.mark.parametrize(
    "parameters", [BOTH, BOTH[:1], BOTH[1:], None], ids=["both", "last", "first", "none"]
)
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_step_is_that_of_the_dequantized_model(folder: Path, storage: str, parameters: Any) -> None:
    """Loss and gradients of PEFT's own forward on the dequantized weights, and logits outside of training."""
    plain = load(folder, storage)
    stacked_experts.dequantize(plain)
    assert not stacked_experts.all_of(plain)
    right, ours = adapted(plain, parameters).train(), adapted(load(folder, storage), parameters).train()
    fused_experts.install_quantized(ours)
    wanted, gradients = step(right)
    for _ in range(2):
        loss, made = step(ours)
        assert abs(float(loss - wanted)) < 1e-5
        assert gradients.keys() == made.keys() and worst(made, gradients) < 1e-4
    with torch.no_grad():
        assert torch.allclose(ours.eval()(IDS).logits, right.eval()(IDS).logits, atol=1e-4)
        with ours.disable_adapter(), right.disable_adapter():
            assert torch.allclose(ours(IDS).logits, right(IDS).logits, atol=1e-4)
        assert torch.allclose(ours(IDS).logits, right(IDS).logits, atol=1e-4)


@torch.no_grad()  # with gradients, bitsandbytes uses another kernel on CPUs with bf16 instructions
def test_saved_adapter_opens_on_the_plain_model_and_on_the_quantized_model(
    folder: Path, tmp_path: Path
) -> None:
    model = adapted(load(folder, "nf4"), BOTH)
    fused_experts.install_quantized(model)
    wanted = model.eval()(IDS).logits
    model.save_pretrained(tmp_path)
    quantized = load(folder, "nf4")
    with stacked_experts.plain_parameters(quantized):
        again = PeftModel.from_pretrained(quantized, str(tmp_path)).eval()
    fused_experts.install_quantized(again)
    assert torch.equal(again(IDS).logits, wanted)
    plain = load(folder, "nf4")
    stacked_experts.dequantize(plain)
    whole = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    assert torch.allclose(whole(IDS).logits, wanted, atol=1e-4)


def experts_of(model: Any) -> Any:
    return decoder_layers(model)[0].mlp.experts


def test_merge_of_pefts_is_refused(folder: Path) -> None:
    model = adapted(load(folder, "nf4"), BOTH)
    fused_experts.install_quantized(model)
    with pytest.raises(UserError, match="can't be merged into quantized experts"):
        experts_of(model).merge()


@pytest.mark.parametrize(("storage", "parameters"), [("nf4", BOTH), ("fp8", None)])
def test_all_layers_share_one_compiled_graph(folder: Path, storage: str, parameters: Any) -> None:
    """Otherwise 48 layers take minutes to compile, and each call looks through 48 graphs."""
    model = adapted(load(folder, storage), parameters).train()
    fused_experts.install_quantized(model)
    model.get_base_model().enable_input_require_grads()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        for layer in decoder_layers(model):
            layer.compile(backend="eager", fullgraph=True)
        step(model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    finally:
        torch._dynamo.reset()


def test_compiled_layers_do_not_save_dequantized_weights(folder: Path) -> None:
    """The partitioner of torch.compile would keep a weight that forward and backward compute alike."""
    model = adapted(load(folder, "nf4"), BOTH).train()
    fused_experts.install_quantized(model)
    loss, gradients = step(model)
    saved = list[torch.Size]()
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        again, same = step(model)
    assert abs(float(again - loss)) < 1e-5 and worst(same, gradients) < 1e-4
    assert not [shape for shape in saved if shape[-2:] in ((80, 64), (64, 48))]


def test_adapter_of_a_model_that_was_dequantized_merges(folder: Path) -> None:
    """As the error of a merge into fp8 weights advises."""
    model = adapted(load(folder, "fp8"), BOTH).eval()
    fused_experts.install_quantized(model)
    model.get_base_model().dequantize(torch.float32)
    assert not stacked_experts.all_of(model)
    wanted = model(IDS).logits
    right = load(folder, "fp8").dequantize(torch.float32)
    assert torch.allclose(adapted(right, BOTH).eval()(IDS).logits, wanted, atol=1e-4)
    assert torch.allclose(model.merge_and_unload()(IDS).logits, wanted, atol=1e-4)


@torch.no_grad()  # see above
def test_unloaded_adapter_is_gone(folder: Path) -> None:
    """Also while the model trains."""
    model = adapted(load(folder, "nf4"), BOTH)
    fused_experts.install_quantized(model)
    base = model.unload()
    plain = load(folder, "nf4")
    for training in (True, False):
        wanted = plain.train(training)(IDS).logits
        assert torch.allclose(base.train(training)(IDS).logits, wanted, atol=1e-5)


def test_second_active_adapter_is_refused(folder: Path) -> None:
    model = adapted(load(folder, "nf4"), BOTH)
    with stacked_experts.plain_parameters(model):
        model.add_adapter("second", model.peft_config["default"])
    fused_experts.install_quantized(model)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UserError, match="one adapter at a time"):
        model.eval()(IDS)


def test_cast_and_save_of_a_quantized_model_are_refused(folder: Path, tmp_path: Path) -> None:
    model = load(folder, "nf4")
    with pytest.raises(TypeError, match="can't be cast"):
        model.model.layers[0].mlp.experts.bfloat16()
    with pytest.raises(ValueError, match="serializable"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_dequantized_model_has_no_quantized_experts(folder: Path, storage: str) -> None:
    model = load(folder, storage).dequantize(torch.float32)
    assert not stacked_experts.all_of(model)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    config = CONFIGS[storage]()
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_training_loop_of_ones_own_saves_no_dequantized_stack(folder: Path) -> None:
    """`finetune.load_model` runs quantized experts fused, also with an adapter of plain PEFT."""
    model = api.load_model(folder, quantization="nf4")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).train()
    saved = list[Any]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(IDS, labels=IDS).loss.backward()
    stacks = [t for t in saved if t.dim() == 3 and t.shape[0] == 4 and 64 in t.shape[1:]]
    assert stacks and not any(one.is_floating_point() for one in stacks)


MIXTURES = [name for name, values in TINY.items() if any("experts" in key for key in values)]


@pytest.mark.parametrize("family", [*MIXTURES, "llama4_text"])
def test_only_experts_that_can_train_are_quantized(family: str) -> None:
    """The rule for a config, which `check` and `plan` use, against the rule for a live model."""
    config = config_of(family) if family in BY_TYPE else AutoConfig.for_model(family, **TINY[family])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stacks = fused_experts.stacked(model)
    live = {fused_experts.unsupported_reason(module, wrappers) for module, wrappers in stacks}
    if stacks and not kernel_limits.experts_unsupported_reason(config, shapes):
        assert live <= {"", "the experts train"}
        fits = not kernel_limits.stacks_unsupported_reason(shapes)
        assert len(stacked_experts.names(model)) == 2 * len(stacks) * fits
    else:
        quantized = family in kernel_limits.FROZEN_EXPERTS  # these train without an adapter
        assert len(stacked_experts.names(model)) == 2 * len(stacks) * quantized

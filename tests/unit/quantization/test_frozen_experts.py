"""Quantized experts with another gate, biases or layout, and mxfp4 weights as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import api
from finetune.core.errors import UserError
from finetune.kernels.kernel_limits import FROZEN_EXPERTS
from finetune.quantization import stacked_experts
from finetune.quantization.bnb_loading import EightBitConfig, FourBitConfig
from finetune.quantization.fp8_loading import Fp8BaseConfig
from finetune.speed import fused_experts
from finetune.speed.frozen_experts import FrozenExperts
from finetune.speed.live_model_spec import decoder_layers
from support import four_bit, quantized_checkpoints
from support.architectures import CONFIGS as SIZES
from support.fused_models import IDS, step, worst
from support.paths import MODEL

if TYPE_CHECKING:
    from pathlib import Path

CONFIGS: dict[str, Any] = {
    "nf4": lambda **more: FourBitConfig(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **more),
    "fp8": Fp8BaseConfig,
    "int8": EightBitConfig,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    made = {}
    for family in FROZEN_EXPERTS:
        torch.manual_seed(0)
        made[family] = tmp_path_factory.mktemp(family)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES[family])).save_pretrained(
            made[family]
        )
    return made


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    return quantized_checkpoints.mxfp4_of_gpt_oss(MODEL, tmp_path_factory.mktemp("mxfp4"), 4096)


def load(folder: Path, storage: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CONFIGS[storage]()
    )
    return four_bit.without_repacking(model)


def adapted(base: Any) -> Any:
    torch.manual_seed(1)
    with stacked_experts.plain_parameters(base):
        model = get_peft_model(base, LoraConfig(r=4, target_modules=r".*self_attn\.q_\w*proj"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def experts_of(model: Any) -> list[Any]:
    return [module for layer in decoder_layers(model) for module, _ in fused_experts.stacked(layer)]


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("family", FROZEN_EXPERTS)
def test_step_is_that_of_the_dequantized_model(folders: Any, family: str, storage: str) -> None:
    """Loss, gradients and logits of transformers' own forward on the dequantized weights."""
    plain = load(folders[family], storage)
    assert len(stacked_experts.all_of(plain)) == 2 * len(experts_of(plain)) > 0
    stacked_experts.dequantize(plain)
    right, ours = adapted(plain).train(), adapted(load(folders[family], storage)).train()
    fused_experts.install_quantized(ours)
    assert all(isinstance(one.finetune_experts, FrozenExperts) for one in experts_of(ours))
    wanted, gradients = step(right)
    loss, made = step(ours)
    assert abs(float(loss - wanted)) < 1e-5
    assert gradients.keys() == made.keys() and worst(made, gradients) < 1e-4
    with torch.no_grad():
        assert torch.allclose(ours.eval()(IDS).logits, right.eval()(IDS).logits, atol=1e-4)


def test_compiled_layers_share_a_graph_and_save_no_dequantized_weight(folders: Any) -> None:
    model = adapted(load(folders["gpt_oss"], "nf4")).train()
    fused_experts.install_quantized(model)
    model.get_base_model().enable_input_require_grads()
    loss, gradients = step(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    saved = list[torch.Tensor]()
    try:
        for layer in decoder_layers(model):
            layer.mlp.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            again, same = step(model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    finally:
        torch._dynamo.reset()
    assert abs(float(again - loss)) < 1e-5 and worst(same, gradients) < 1e-4
    stacks = {tuple(one.shape) for one in saved if one.dim() == 3 and one.is_floating_point()}
    assert not stacks & {tuple(by.shape) for _, by in stacked_experts.all_of(model)}


@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_mxfp4_experts_stay_as_they_are_stored(mxfp4: Any, storage: Any) -> None:
    folder, whole = mxfp4
    model: Any = api.load_model(folder, quantization=storage)
    held = stacked_experts.all_of(model)
    assert {by.storage for _, by in held} == {"mxfp4"}
    for name, weight in whole.items():
        owner, _, leaf = name.rpartition(".")
        assert torch.equal(getattr(model.get_submodule(owner), leaf), weight)
    bits = 8 * sum(values.numel() + by.stored(values)[1].numel() for values, by in held)
    assert bits == 4.25 * sum(weight.numel() for weight in whole.values())
    plain: Any = api.load_model(folder, quantization="none")
    ids: Any = torch.randint(5, 4000, (2, 40), generator=torch.Generator().manual_seed(0))
    assert float(model(ids, labels=ids).loss) == pytest.approx(float(plain(ids, labels=ids).loss), abs=0.02)


def test_fp8_base_model_keeps_mxfp4_experts(mxfp4: Any) -> None:
    folder, whole = mxfp4
    config: Any = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, quantization_config=Fp8BaseConfig(mxfp4_experts=True)
    )
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float8_e4m3fn
    name, weight = next(iter(whole.items()))
    owner, _, leaf = name.rpartition(".")
    assert torch.equal(getattr(model.get_submodule(owner), leaf).float(), weight)


def test_adapter_on_frozen_experts_is_refused(folders: Any) -> None:
    base = load(folders["gpt_oss"], "nf4")
    targets = ["mlp.experts.down_proj"]
    with stacked_experts.plain_parameters(base):
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
    with pytest.raises(UserError, match="can't train on quantized experts with this adapter") as refused:
        fused_experts.install_quantized(model)
    assert "an adapter on quantized experts of gpt_oss is not supported" in str(refused.value)

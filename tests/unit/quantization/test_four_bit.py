"""bitsandbytes' 4-bit weights in the fast forwards: equal to bitsandbytes' own, held once, never kept."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional, nn
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.kernels import ops
from finetune.quantization import four_bit
from finetune.speed.fused_layers import Fused, unsupported_reason
from finetune.speed.live_model_spec import decoder_layers
from support import tiny_models
from support.four_bit import in_four_bits
from support.soak import soak_except


def layer(
    rows: int, columns: int, dtype: torch.dtype, quant_type: str, *, nested: bool, blocksize: int = 64
) -> Any:
    """A layer whose rows are of very different sizes."""
    torch.manual_seed(rows)
    weight = (torch.randn(rows, columns) * torch.rand(rows, 1).exp()).to(dtype)
    codes, state = functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
    )
    made = nn.Linear4bit(columns, rows, bias=False, compute_dtype=dtype, quant_type=quant_type)
    made.weight = nn.Params4bit(codes, quant_state=state, blocksize=blocksize, bnb_quantized=True)
    return made


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [32, 64, 256])
def test_every_weight_equals_bitsandbytes(quant_type: str, nested: bool, blocksize: int) -> None:
    """In every dtype, of one layer and of three in one call; 300 blocks are no whole group of scales."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        layers = [
            layer(rows, 512, dtype, quant_type, nested=nested, blocksize=blocksize) for rows in (150, 8, 33)
        ]
        assert not any(map(four_bit.unsupported_reason, layers))
        own = [functional.dequantize_4bit(one.weight.data, one.weight.quant_state) for one in layers]
        assert torch.equal(four_bit.weight(layers[0]), own[0])
        together = ops.dequantize([tensor for one in layers for tensor in four_bit.stored(one)], dtype)
        assert together.dtype == dtype and torch.equal(together, torch.cat(own))


def test_the_operator_is_one_and_its_codes_are_not_copied() -> None:
    made = layer(64, 128, torch.float32, "nf4", nested=True)
    packed, absmax, table = four_bit.stored(made)
    assert packed.data_ptr() == made.weight.data_ptr() and absmax is made.weight.quant_state.absmax
    assert table.nbytes < made.weight.nbytes
    torch.library.opcheck(ops.dequantize, ([packed, absmax, table], torch.bfloat16))
    bits = made.weight.data.view(-1).view(torch.bfloat16)  # `bnb_4bit_quant_storage`
    expected = four_bit.weight(made)
    made.weight = nn.Params4bit(bits, quant_state=made.weight.quant_state, bnb_quantized=True)
    assert torch.equal(four_bit.weight(made), expected)


def test_packed_for_fsdp_they_are_the_same_codes_in_fp32() -> None:
    """Also of a checkpoint whose codes were bytes; shared with nothing, and packed once."""
    made = layer(64, 128, torch.float32, "nf4", nested=True)
    x, codes = torch.randn(3, 128), made.weight.data.clone()
    expected, weight = made(x), four_bit.weight(made)
    for _ in range(2):
        four_bit.pack(torch.nn.Sequential(made))
    assert isinstance(made.weight, nn.Params4bit) and made.weight.dtype == torch.float32
    assert made.weight.shape == (64 * 128 // 8, 1) and not made.weight.requires_grad
    assert torch.equal(made.weight.data.view(-1).view(torch.uint8), codes.view(-1))
    assert torch.equal(made(x), expected) and torch.equal(four_bit.weight(made), weight)


def adapted(**sizes: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99,
        **{"intermediate_size": 128, **sizes},
    )  # fmt: skip
    model = in_four_bits(LlamaForCausalLM(config))
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).train()


@pytest.mark.parametrize("backend", soak_except(["eager"], ["eager", "aot_eager"]))
def test_no_weight_is_kept_for_backward(backend: str) -> None:
    """A compiler would keep what forward and backward both make: each weight, whole, of every layer."""
    model = adapted()
    Fused(model, decoder_layers(model))
    torch._dynamo.reset()
    for one in decoder_layers(model):
        one.compile(fullgraph=True, backend=backend)
    kept: list[torch.Tensor] = []
    ids = torch.arange(20).view(1, 20)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    weights = {(192, 64), (64, 64), (256, 64), (64, 128)}  # q, k and v; o; gate and up; down
    assert kept and not weights & {tuple(one.shape) for one in kept if one.is_floating_point()}


def test_what_cannot_be_read_is_left_with_its_reason() -> None:
    model = adapted(intermediate_size=96)
    fused = Fused(model, decoder_layers(model))
    assert dict(fused.left) == {"its rows of 96 weights are not whole 4-bit blocks of 64": 2}
    assert fused.served == 12
    other = layer(64, 128, torch.float32, "nf4", nested=True)
    other.weight.quant_state.state2.blocksize = 128
    assert "quantized in blocks of 128" in unsupported_reason(other)
    other.weight.quant_state.shape = torch.Size([128, 64])
    assert "is stored as (128, 64)" in unsupported_reason(other)
    other.weight.quant_state = None
    assert "not in bitsandbytes' own layout" in unsupported_reason(other)
    assert unsupported_reason(nn.Linear8bitLt(64, 64)) == "the base model is stored as Linear8bitLt"


def test_rows_of_partial_blocks_are_refused_where_the_cpu_reads_them_incorrectly() -> None:
    """bitsandbytes 0.50.2 does so with AVX512. A GPU reads them correctly."""
    for row in (32, 64, 72, 96):
        made = layer(64, row, torch.float32, "nf4", nested=True)
        weight = functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
        blocks = made.weight.quant_state
        blocks.shape = torch.Size([row, 64])
        is_right = torch.equal(
            functional.dequantize_4bit(made.weight.data, blocks).flatten(), weight.flatten()
        )
        blocks.shape = torch.Size([64, row])
        found = four_bit.rows(torch.nn.Sequential(made))
        assert found == {"0": (row, 64)}
        with nullcontext() if is_right else pytest.raises(UserError, match="of 1 layers incorrectly"):
            four_bit.check_rows(found)


@pytest.mark.parametrize("kind", ["qlora", "model.quantization=fp4"])
def test_a_model_that_this_cpu_reads_incorrectly_is_named_by_check_and_refused_by_train(
    kind: str, tmp_path: Path, capsys: Any
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**tiny_models.sizes(num_key_value_heads=4)))
    given = [f"adapter.type={kind}" if "." not in kind else kind]
    recipe = str(tiny_models.recipe(tmp_path, tiny_models.save(tmp_path / "model", model)))
    reads = not four_bit._misreads(32, 64)
    assert main.main(["check", recipe, *given]) == 0
    assert ("train would stop on this machine" in capsys.readouterr().out) != reads
    assert main.main(["train", recipe, *given]) == (0 if reads else 3)
    assert ("incorrectly on this CPU" in capsys.readouterr().err) != reads

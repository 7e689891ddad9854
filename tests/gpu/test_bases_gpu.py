"""Quantized bases on a GPU: what they compute, where gradients go, what they weigh; and what needs CUDA."""

from itertools import product

import pytest
import torch
from accelerate.utils.memory import clear_device_cache

from finetune.adapters import attach, trainable_parameters
from finetune.autoconfig import machine_setup
from finetune.core.run_checks import RunChecks
from finetune.evaluation import reopen
from finetune.export import merging, plain_base
from finetune.recipe import adapter_types, loader
from support.paths import MODEL, QUICKSTART
from support.runs import run_checks
from support.soak import soak_except

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # types say what they can't do later, as in test_adapter_types.py
    pytest.mark.filterwarnings(
        "ignore::UserWarning:peft", "ignore::RuntimeWarning:peft", "ignore:Sparse invariant checks"
    ),
]

IDS = torch.arange(8, 136).reshape(2, 64)
# relative, of logits: bf16 products in another order; LLM.int8() rounds activations to 8 bits too
LOGITS = {"nf4": 0.02, "fp4": 0.02, "int8": 0.08, "torchao_int8": 0.02}
# bytes a weight: codes, their scales (of blocks of 64, double quantized; of a row)
BYTES = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
TYPES = [name for name, kind in adapter_types.all_types().items() if kind.peft and not kind.refused]

# Each storage and each kind of forward; types that the fast forwards, the checkpoints or the masks know apart
ADAPTED = [*((storage, "lora") for storage in LOGITS), ("nf4", "dora"), ("int8", "adalora"), ("fp4", "ia3")]
OFTEN = ["lora", "dora", "adalora", "ia3", "qlora", "oft", "vblora", "prefix_tuning", "fourierft", "vera"]


def opened(storage: str, kind: str = "lora", name: str = str(MODEL)):
    options = [f"adapter.type={kind}", f"model.quantization={storage}", f"model.name={name}"]
    return loader.load(QUICKSTART, options)


@pytest.mark.parametrize(
    ("storage", "kind"), soak_except(ADAPTED, product(LOGITS, ["lora", "dora", "adalora", "ia3"]))
)
def test_a_quantized_base_is_its_dequantized_self_and_passes_gradients_on(storage: str, kind: str) -> None:
    loaded = opened(storage, kind)
    setup = machine_setup.choose(attention="auto", base=storage, adapter_type=kind)
    plain = plain_base.plain_base(loaded, setup).bfloat16()
    found = []
    for base in (reopen.open_base(loaded), plain):
        torch.manual_seed(0)
        adapted = attach.attach(base, loaded.adapter, 20, RunChecks()).train()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trainable_parameters.trainable(adapted).values():
                parameter.add_(1e-2 * torch.randn(parameter.shape).to(parameter))
        ids = IDS.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            output = adapted(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        reached = {name for name, p in adapted.named_parameters() if p.grad is not None}
        assert reached == trainable_parameters.trainable(adapted).keys(), "gradients reach the adapter alone"
        gradient = torch.cat(
            [p.grad.float().flatten() for p in trainable_parameters.trainable(adapted).values()]
        )
        found.append((output.logits.float().detach(), gradient))
    (logits, gradient), (wanted, right) = found
    assert torch.linalg.norm(logits - wanted) < LOGITS[storage] * torch.linalg.norm(wanted)
    assert torch.linalg.norm(gradient - right) < 3 * LOGITS[storage] * torch.linalg.norm(right)


@pytest.mark.parametrize("storage", list(BYTES))
def test_memory_is_what_one_computes(storage: str, tmp_path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16,
        vocab_size=4096, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    clear_device_cache(garbage_collection=True)
    before = torch.cuda.memory_allocated()
    base = reopen.open_base(opened(storage, name=str(tmp_path)))
    clear_device_cache(garbage_collection=True)
    got = torch.cuda.memory_allocated() - before
    weights = 4 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
    wanted = weights * BYTES[storage] + 4096 * 2048 * 2
    assert abs(got - wanted) < 0.05 * wanted, f"{got / 2**20:.1f} MiB, computed {wanted / 2**20:.1f}"
    del base


@pytest.mark.parametrize("storage", ["fp4", "int8", "torchao_int8"])
def test_a_quantized_base_trains_and_verifies(storage: str, train) -> None:
    run = train(f"model.quantization={storage}", "train.max_steps=5")
    assert all(check["passed"] for check in run_checks(run).values())


@pytest.mark.parametrize("kind", soak_except(["qlora"], ["qlora", "qdora"]))
def test_loftq_starts_nearer_to_the_weights_than_the_quantized_base(kind: str, train) -> None:
    run = train(f"adapter.type={kind}", "adapter.init_lora_weights=loftq", "train.max_steps=5")
    got = run_checks(run)
    assert (
        all(check["passed"] for check in got.values())
        and "loftq" in got["adapter.init_lora_weights"]["actual"]
    )


@pytest.mark.parametrize("kind", soak_except(OFTEN, [name for name in TYPES if name != "trainable_tokens"]))
def test_every_type_of_peft_trains_and_verifies_in_bf16(kind: str, train) -> None:
    run = train(f"adapter.type={kind}", "train.max_steps=5", "eval.max_new_tokens=2")
    assert all(check["passed"] for check in run_checks(run).values())


@pytest.mark.parametrize("storage", ["none", "nf4", "int8"])
def test_a_merge_is_proved_on_a_gpu(storage: str, train) -> None:
    run = train(f"model.quantization={storage}", "train.max_steps=5", "train.learning_rate=1e-2")
    figures = merging.run(run.path)["against_tuned"]
    assert figures["relative"] < (0.1 if storage == "int8" else 0.05), figures

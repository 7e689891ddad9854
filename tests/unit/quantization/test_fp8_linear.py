"""The frozen fp8 base: its maths by emulation, how it is loaded, what PEFT makes of it, and who is refused.

Relative errors are ||got - wanted|| / ||wanted||. e4m3 has three bits of mantissa: rounding a value that is
spread evenly costs about 2.6 %, and a product of two rounded matrices about 3.6 %.
"""

import gc
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapters import attach, trainable_parameters
from finetune.autoconfig import base_quantization, mixed_precision
from finetune.cli import main
from finetune.core.errors import Exit, UserError
from finetune.core.run_checks import Choice, RunChecks
from finetune.evaluation import evaluator
from finetune.export import merging
from finetune.hardware.detection import Hardware
from finetune.kernels import ops
from finetune.models import quantization_checks
from finetune.quantization import fp8_linear, fp8_loading
from finetune.recipe import adapter_types, loader
from support.fp8_models import CPU, IDS, error, load
from support.paths import MODEL
from support.runs import run_checks

H100 = Hardware("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 80, 64)
L4, A100 = Hardware("cuda", "NVIDIA L4", 1, (8, 9), 24, 8), Hardware("cuda", "NVIDIA A100", 1, (8, 0), 80, 8)
KINDS = {name: kind for name, kind in adapter_types.all_types().items() if kind.peft and not kind.refused}
TYPES = [name for name, kind in KINDS.items() if not kind.storage and name != "trainable_tokens"]


def layer(
    out: int = 96, width: int = 128, *, bias: bool = True
) -> tuple[fp8_linear.Fp8Linear, torch.nn.Linear]:
    """An fp8 layer, and the plain one that it was made of."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(width, out, bias=bias)
    with torch.no_grad():
        plain.weight *= torch.logspace(-3, 1, out)[:, None]  # rows of very different size
    return fp8_linear.Fp8Linear.of(plain), plain


def test_quantized_rows_are_within_half_a_step_of_e4m3() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.logspace(-20, 20, 64)[:, None]
    codes, scale = ops.quantize_rows(x)
    assert codes.dtype == ops.E4M3 and scale.dtype == torch.float32 and scale.shape == (64, 1)
    assert codes.float().abs().amax(-1).eq(448).all()  # each row uses the whole range
    off = (codes.float() - x / scale).abs()
    assert (off <= torch.clamp((x / scale).abs() * 2**-4, min=2**-10) * 1.001).all()
    assert error(codes.float() * scale, x) < 0.03
    assert not codes.view(torch.bfloat16).isnan().any(), "FSDP would gather other codes: exchange.fsdp_policy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_and_what_is_not_finite_is_never_hidden(dtype: torch.dtype) -> None:
    x = torch.ones(5, 16, dtype=dtype)
    x[0] = 0
    x[1, 3], x[2, 3], x[3, 3] = float("nan"), float("inf"), float("-inf")
    x[4] = 1e-39  # too small for a normal number
    codes, scale = ops.quantize_rows(x)
    back = codes.float() * scale
    assert back[0].eq(0).all() and back[4].isfinite().all()
    assert back[1:4].isnan().all()
    assert fp8_linear.product(codes, scale, *ops.quantize_rows(torch.ones(16, 16)), dtype)[1:4].isnan().all()


def test_forward_and_gradient_against_the_dequantized_weight() -> None:
    quantized, plain = layer()
    assert error(quantized.dequantize(), plain.weight.detach()) < 0.03
    x, g = torch.randn(2, 24, 128, requires_grad=True), torch.randn(2, 24, 96)
    y = quantized(x)
    wanted = torch.nn.functional.linear(x, quantized.dequantize(), plain.bias)
    assert y.shape == (2, 24, 96) and error(y.detach(), wanted.detach()) < 0.03
    (gradient,), (right,) = torch.autograd.grad(y, x, g), torch.autograd.grad(wanted, x, g)
    assert error(gradient, right) < 0.035
    with torch.no_grad():  # of the same codes, nothing else is lost
        codes, scale = ops.quantize_rows(x.view(-1, 128))
        exact = (codes.double() * scale) @ quantized.dequantize().double().T + plain.bias
        assert error(y.view(-1, 96), exact) < 1e-6
        codes, scale = ops.quantize_rows(g.view(-1, 96) * quantized.weight_scale.T)
        assert error(gradient.view(-1, 128), (codes.double() * scale) @ quantized.weight.double()) < 1e-6


def test_it_works_in_place_in_bf16_and_in_autocast() -> None:
    quantized, plain = layer()
    x = torch.randn(4, 128, requires_grad=True)
    y = quantized(x)
    y += 1  # AdaLoRA adds to a layer's output in place
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(torch.autograd.grad(quantized(x).sum(), x)[0], gradient)
    assert quantized(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert quantized(x).dtype == torch.bfloat16
        assert error(quantized(x).detach(), quantized(x.detach().bfloat16())) < 0.02
    with pytest.raises(TypeError, match="can't be cast"):
        fp8_linear.Fp8Linear.of(plain).bfloat16()
    assert fp8_linear.Fp8Linear.of(plain).to("cpu").weight.dtype == ops.E4M3


def test_no_rows_are_no_error() -> None:
    quantized, plain = layer()
    x = torch.zeros(0, 3, 128)
    assert quantized(x).shape == plain(x).shape and not quantized(torch.zeros(2, 0, 128)).numel()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_is_traced_without_a_break(backend: str) -> None:
    quantized, _ = layer()
    x = torch.randn(2, 8, 128, requires_grad=True)
    compiled = torch.compile(lambda x: quantized(x * 2), backend=backend, fullgraph=True)
    gradients = [
        torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, lambda x: quantized(x * 2))
    ]
    assert torch.equal(*gradients)


def test_every_linear_layer_but_the_head_is_loaded_in_fp8() -> None:
    checks = RunChecks()
    base = load()
    quantization_checks.add_fp8_check(base, checks)
    (check,) = checks.as_json()
    assert check["passed"] and check["actual"].startswith("42 of 42 linear layers, ")
    kinds = {
        name.rpartition(".")[2] for name, m in base.named_modules() if isinstance(m, fp8_linear.Fp8Linear)
    }
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert base.lm_head.weight.dtype == torch.float32 and not any(
        p.requires_grad for p in base.parameters() if p.dtype == ops.E4M3
    )
    whole = load_file(MODEL / "model.safetensors")
    for name, module in base.named_modules():
        if isinstance(module, fp8_linear.Fp8Linear):
            codes, scale = ops.quantize_rows(whole[f"{name}.weight"])
            assert torch.equal(module.weight.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(module.weight_scale, scale)
    plain = load().dequantize(torch.float32)
    assert not any(isinstance(m, fp8_linear.Fp8Linear) for m in plain.modules()) and not plain.is_quantized
    with torch.no_grad():
        assert error(base(IDS).logits, plain(IDS).logits) < 0.08
    with pytest.raises(ValueError, match="not serializable"):
        base.save_pretrained("never")


def test_loading_holds_no_second_copy_of_what_is_quantized(two_layers, monkeypatch) -> None:
    """At each quantization, the only weight in memory that is not codes yet is the one that is read."""
    sizes = {(256, 256), (128, 256), (704, 256), (256, 704)}  # of the layers; the embedding has 4096 rows
    held, quantize = [], ops.quantize_rows

    def whole() -> dict[int, torch.Tensor]:
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        live = [t for t in tensors if tuple(t.shape) in sizes]
        return {t.data_ptr(): t for t in live if t.device.type == "cpu" and t.dtype != ops.E4M3}

    before = whole()  # of tests that ran before in this process; kept, so that no address is used again

    def counting(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held.append(len(whole().keys() - before.keys()))
        return quantize(x)

    monkeypatch.setattr(fp8_loading, "quantize_rows", counting)
    load(two_layers, dtype=torch.bfloat16)
    assert len(held) == 14 and max(held) == 1


def test_layers_that_do_not_fit_stay_and_are_counted(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    made = LlamaForCausalLM(config)
    torch.nn.init.normal_(made.model.layers[0].self_attn.q_proj.bias)
    made.save_pretrained(tmp_path)
    base, checks = load(tmp_path), RunChecks()
    quantization_checks.add_fp8_check(base, checks)
    assert "4 of 7 linear layers" in checks.as_json()[0]["actual"]
    assert "3 have sides not divisible by 16" in checks.as_json()[0]["actual"]
    q_proj = base.model.layers[0].self_attn.q_proj
    assert torch.equal(q_proj.bias, made.model.layers[0].self_attn.q_proj.bias)
    assert torch.equal(base.model.layers[0].mlp.up_proj.weight, made.model.layers[0].mlp.up_proj.weight)


def attached(base, kind: str):
    loaded = loader.load("recipes/quickstart.yaml", [f"adapter.type={kind}"])
    torch.manual_seed(0)
    return attach.attach(base, loaded.adapter, 20, RunChecks()).train()


@pytest.mark.parametrize("kind", ["lora", "dora", "adalora"])
def test_an_adapter_starts_as_on_a_base_in_bf16(kind: str) -> None:
    """PEFT moves a new adapter to the base's dtype; through e4m3 it would be rounded to eight bits."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    fresh = trainable_parameters.trainable(attached(load(dtype=torch.bfloat16), kind))
    wanted = trainable_parameters.trainable(attached(plain, kind))
    assert fresh.keys() == wanted.keys() and {p.dtype for p in fresh.values()} == {torch.float32}
    for name in [name for name in fresh if "magnitude" not in name]:
        assert torch.equal(fresh[name], wanted[name]), name


def test_peft_s_magnitude_is_that_of_the_dequantized_weight() -> None:
    adapted = attached(load(dtype=torch.bfloat16), "dora")
    for _, module in adapted.named_modules():
        if hasattr(module, "lora_magnitude_vector"):
            magnitude = module.lora_magnitude_vector["default"].weight
            rows = torch.linalg.norm(module.get_base_layer().dequantize(), dim=1)
            assert magnitude.dtype == torch.float32 and error(magnitude.detach(), rows) < 1e-6


# Types say what they can't do later, such as BEFT that can't be merged (peft 0.21.2, tuners/beft/layer.py)
@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")
@pytest.mark.parametrize("kind", TYPES)
def test_which_types_train_on_it(kind: str, two_layers, capsys) -> None:
    """Each by its gradients against those on the dequantized weights, or refused by name."""
    reason = adapter_types.unsupported_reason(kind, "fp8")
    if reason:
        options = [f"adapter.type={kind}", "model.quantization=fp8"]
        assert main.main(["check", "recipes/quickstart.yaml", *options]) == 2
        assert kind in capsys.readouterr().err
        return
    found = []
    for base in (load(two_layers), load(two_layers).dequantize(torch.float32)):
        adapted = attached(base, kind)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trainable_parameters.trainable(adapted).values():
                parameter.add_(1e-2 * torch.randn_like(parameter))
        loss = adapted(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        found.append(
            (float(loss.detach()), {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None})
        )
    (loss, got), (right, wanted) = found
    assert got.keys() == wanted.keys() and got
    assert loss == pytest.approx(right, rel=0.02)
    flat = [torch.cat([gradients[name].flatten() for name in wanted]) for gradients in (got, wanted)]
    assert error(*flat) < 0.3


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_an_adapter_is_merged_into_weights_and_not_into_codes(two_layers, kind: str) -> None:
    adapted = attached(load(two_layers), kind)
    with torch.no_grad():
        for parameter in trainable_parameters.trainable(adapted).values():
            parameter.add_(1e-2)
        for merge in (adapted.merge_adapter, adapted.merge_and_unload):
            with pytest.raises(UserError, match=r"fp8 weights(?s:.*)finetune merge RUN"):
                merge()
        before = adapted(input_ids=IDS).logits
        adapted.get_base_model().dequantize(torch.float32)
        merged = adapted.merge_and_unload()(input_ids=IDS).logits
    assert error(merged, before) < 0.1


def test_a_run_on_it_trains_verifies_evaluates_and_merges(train, two_layers, monkeypatch) -> None:
    """Through the command, as on a GPU that has fp8 GEMMs: only whether they are there is answered for it."""
    with monkeypatch.context() as patch:
        patch.setattr(mixed_precision, "fp8_missing", lambda machine, precision: "")
        options = [
            "model.quantization=fp8",
            "adapter.type=dora",
            f"model.name={two_layers}",
            "train.max_steps=8",
        ]
        options += ["train.learning_rate=1e-2", "train.logging_steps=1", "eval.max_new_tokens=2"]
        run = train(*options)
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert got["model.quantization"]["actual"].startswith("14 of 14 linear layers")
    losses = [json.loads(line)["loss"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    (note,) = [
        note for note in evaluator.run(run.path)["settings"]["notes"] if "fp8" in note
    ]  # and now without them
    assert "no fp8 GEMMs" in note
    report = merging.run(run.path)
    assert report["against_tuned"]["relative"] < 0.05 and report["merged_onto"] == "fp8"
    merged = json.loads((run.path / "merged" / "config.json").read_text())
    assert "quantization_config" not in merged
    assert main.main(["chat", str(run.path), "--prompt", "hello", "--max-new-tokens", "2"]) == 0


def refused(capsys, code: int, *options: str) -> str:
    assert main.main(["check", "recipes/quickstart.yaml", "model.quantization=fp8", *options]) == code
    return capsys.readouterr().err


def test_what_contradicts_it_is_refused_before_anything_loads(capsys) -> None:
    assert "full fine-tuning can't train fp8 weights" in refused(capsys, 2, "adapter.type=full")
    for kind in ("qlora", "qdora"):
        assert f"{kind} needs a 4-bit base model" in refused(capsys, 2, f"adapter.type={kind}")
    for init in ("pissa", "orthogonal", "mica", "loftq"):
        assert "init_lora_weights" in refused(capsys, 2, f"adapter.init_lora_weights={init}")
    assert "quantizes" in refused(capsys, 2, "adapter.modules_to_save=[q_proj]")
    assert "quantize" in refused(capsys, 2, "adapter.target_parameters=[q_proj.weight]")
    assert main.main(["check", "recipes/quickstart.yaml", "model.quantization=fp8"]) == 0
    assert main.main(["check", "recipes/quickstart.yaml", "adapter.modules_to_save=[embed_tokens]"]) == 0


@pytest.mark.parametrize("machine", [CPU, A100])
def test_without_fp8_gemms_it_is_refused_for_training_and_emulated_for_the_rest(machine: Hardware) -> None:
    with pytest.raises(UserError, match="no fp8 GEMMs") as raised:
        base_quantization.choose_base("fp8", "lora", "bf16", machine, "")
    assert raised.value.code == Exit.ENVIRONMENT and "model.quantization: auto" in str(raised.value)
    again = base_quantization.choose_base("fp8", "lora", "bf16", machine)
    assert again.value == "fp8" and "no fp8 GEMMs" in again.reason


def test_on_a_gpu_without_autocast_it_is_refused() -> None:
    with pytest.raises(UserError, match="precision is no"):
        base_quantization.choose_base("fp8", "lora", "no", H100, "")


def test_training_is_refused_here(train, capsys) -> None:
    train("model.quantization=fp8", code=3)
    assert "CPU has no fp8 GEMMs" in capsys.readouterr().err


def auto(machine: Hardware, precision: str = "bf16", *options: str) -> Choice:
    from finetune.autoconfig import fp8_support
    from finetune.models import model_files

    loaded = loader.load("recipes/quickstart.yaml", list(options))
    kind = loaded.adapter.type
    against_fp8 = fp8_support.against_fp8(loaded, model_files.read_config(loaded.model))
    return base_quantization.choose_base("auto", kind, precision, machine, against_fp8)


def test_auto_takes_it_where_it_pays_and_says_why_not(tmp_path) -> None:
    wide = json.loads((MODEL / "config.json").read_text()) | {"hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    large = f"model.name={tmp_path}"
    for kind in ("lora", "rslora", "dora", "adalora", "ia3"):
        for machine in (H100, L4):
            assert auto(machine, "bf16", large, f"adapter.type={kind}").value == "fp8"
    reasons = {
        "no fp8 GEMMs": auto(A100, "bf16", large),
        "width 256": auto(H100),
        "with oft": auto(H100, "bf16", large, "adapter.type=oft"),
        "pissa": auto(H100, "bf16", large, "adapter.init_lora_weights=pissa"),
        "vllm": auto(H100, "bf16", large, "eval.engine=vllm", "eval.tasks=[arc_easy]"),
        "modules_to_save trains layers": auto(H100, "bf16", large, "adapter.modules_to_save=[q_proj]"),
    }
    for reason, choice in reasons.items():
        assert choice.value == "bf16" and reason in choice.reason
    assert auto(H100, "bf16", large, "adapter.type=qlora").value == "nf4"
    assert auto(H100, "bf16", large, "adapter.type=full").value == "fp32"
    assert auto(CPU, "no", large) == Choice(
        "fp32", "the launch computes in fp32, and an fp8 base model needs bf16"
    )  # and the config is not read
    (tmp_path / "config.json").write_text(
        json.dumps(wide | {"model_type": "mixtral", "num_local_experts": 8})
    )
    assert "8 experts" in auto(H100, "bf16", large).reason
    (tmp_path / "config.json").write_text(
        json.dumps(wide | {"quantization_config": {"quant_method": "gptq"}})
    )
    assert "gptq" in auto(H100, "bf16", large).reason


def test_experts_that_stay_are_in_the_run_check() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32, "num_experts": 4}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=99, num_experts_per_tok=2, **sizes)
    checks = RunChecks()
    quantization_checks.add_fp8_check(AutoModelForCausalLM.from_config(config), checks)
    assert "of experts are not quantized" in checks.as_json()[0]["actual"]


def test_a_convolution_is_no_expert() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    checks, config = RunChecks(), AutoConfig.for_model("mamba", vocab_size=99, **sizes)
    quantization_checks.add_fp8_check(AutoModelForCausalLM.from_config(config), checks)
    assert "experts" not in checks.as_json()[0]["actual"]

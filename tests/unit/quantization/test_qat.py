"""Quantization-aware training: what forward rounds is what is stored, and nothing else is asked for."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.evaluation import reopen
from finetune.quantization import qat
from finetune.recipe import loader, qat_rules
from finetune.recipe.schema import QAT_CONFIGS, Qat
from finetune.run_folder.run_folder import RunFolder
from support.paths import MODEL, QUICKSTART
from support.runs import metrics

INTX = "speed.qat.config=IntxWeightOnly"
IDS = torch.arange(3, 3999, 37).reshape(4, 27)
RUNS: dict[str, Path] = {}


def base():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def adapted(kind: str = "lora", section: Qat | None = None, **options):
    """An adapter with weights that change something, on a prepared base."""
    from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model

    config = {
        "lora": lambda: LoraConfig(r=4, target_modules="all-linear", **options),
        "dora": lambda: LoraConfig(r=4, target_modules="all-linear", use_dora=True),
        "adalora": lambda: AdaLoraConfig(target_r=4, init_r=6, total_step=9, target_modules=["q_proj"]),
        "ia3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    }[kind]()
    config.task_type = "CAUSAL_LM"
    torch.manual_seed(0)
    model = get_peft_model(qat.prepare(base(), section), config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter) * ("magnitude" not in name)
    return qat.follow(model)


def logits(opened) -> torch.Tensor:
    with torch.no_grad():
        return opened.eval()(input_ids=IDS).logits


def stored(model, section: Qat) -> torch.Tensor:
    """Logits of the model merged by PEFT and quantized by torchao."""
    from torchao.quantization import quantize_

    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    head = merged.get_output_embeddings()
    config = qat.torchao_config(section)
    quantize_(merged, config, filter_fn=lambda m, _: isinstance(m, torch.nn.Linear) and m is not head)
    return logits(merged)


@pytest.mark.parametrize("config", QAT_CONFIGS)
@pytest.mark.parametrize("kind", ["lora", "dora", "adalora", "ia3"])
def test_what_forward_computes_is_what_torchao_stores(kind: str, config: str) -> None:
    """PEFT's own merge and torchao's own conversion, on a base that was never prepared."""
    section = Qat(config=config)
    rounded = logits(adapted(kind, section))
    plain = logits(adapted(kind))
    assert (rounded - plain).norm() > 0.05 * plain.norm(), "rounding to 4 bits is felt"
    assert (rounded - stored(adapted(kind), section)).norm() < 1e-5 * plain.norm()


@pytest.mark.parametrize("group_size", [64, None])
@pytest.mark.parametrize("weight_dtype", ["int4", "int8"])
def test_the_scheme_is_the_recipe_s(weight_dtype: str, group_size: int | None) -> None:
    section = Qat(config="IntxWeightOnly", weight_dtype=weight_dtype, group_size=group_size)
    layer = qat.prepare(base(), section).model.layers[0].mlp.up_proj
    with torch.no_grad():
        rounded = layer.weight_fake_quantizer(layer.weight)
    groups = rounded.view(-1, group_size or 256)
    levels = max(len(row.unique()) for row in groups)
    assert levels <= {"int4": 16, "int8": 256}[weight_dtype] and levels > 8


def test_gradients_pass_the_rounding() -> None:
    """Straight through: those of LoRA's matrices are what the gradient of the merged weight makes them."""
    model = adapted("lora", Qat(config="IntxWeightOnly"))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    inputs = torch.randn(5, 256)
    layer(inputs).square().sum().backward()
    a, b = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
    whole = 2 * layer(inputs).detach().T @ inputs * layer.scaling["default"]
    weight = (layer.base_layer.weight + layer.get_delta_weight("default")).detach().requires_grad_()
    layer.base_layer.weight_fake_quantizer(weight).sum().backward()
    passed = weight.grad.round()  # none where the largest of a group was cut off: 4 bits end at 7, not at 7.5
    assert set(passed.unique().tolist()) == {0.0, 1.0} and passed.mean() > 0.98
    torch.testing.assert_close(b.grad, (whole * passed) @ a.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(a.grad, b.T @ (whole * passed), rtol=1e-3, atol=1e-3)
    assert layer.base_layer.weight.grad is None


def test_with_the_adapter_off_it_is_the_rounded_base() -> None:
    section = Qat(config="IntxWeightOnly")
    model = adapted("lora", section)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(qat.prepare(base(), section)))


@pytest.fixture
def run(train, tmp_path):
    """`run(type)`: a copy of a run of four steps that is trained once for all tests."""

    def of(kind: str) -> RunFolder:
        if kind not in RUNS:
            rate = {"full": "1e-3"}.get(kind, "4e-3")
            short = ["train.max_steps=4", "eval.max_new_tokens=2", f"train.learning_rate={rate}"]
            RUNS[kind] = train(f"adapter.type={kind}", INTX, *short, name=f"trained-{kind}").path
        return RunFolder(Path(shutil.copytree(RUNS[kind], tmp_path / f"run-{kind}")))

    return of


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_rounds_every_layer_and_reopens_as_it_was(kind: str, run, two_layers) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = run(kind)
    run_checks = {check["option"]: check for check in folder.read("checks.json")}
    assert all(check["passed"] for check in run_checks.values())
    assert run_checks["speed.qat"]["actual"] == "14 layers, IntxWeightOnlyConfig: int4 in groups of 32"
    assert run_checks["fake quantization in step 1"]["actual"].startswith("14 layers, by 9.")
    assert run_checks["saved weights"]["actual"] == "0", "bit for bit"
    assert all(line["grad_norm"] > 0 for line in metrics(folder))
    assert (
        "fake_quant"
        not in (folder.weights / ("config.json" if kind == "full" else "adapter_config.json")).read_text()
    )
    if kind == "full":  # plain weights, for transformers alone
        loaded = AutoModelForCausalLM.from_pretrained(folder.model, output_loading_info=True)
        opened, info = loaded
        assert not info["missing_keys"] and not info["unexpected_keys"]
    else:
        plain = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32)
        opened = PeftModel.from_pretrained(plain, folder.adapter)
    assert qat.rounding(opened) == {}
    reopened = reopen.reopen(folder, loader.load(folder.recipe))
    assert len(qat.rounding(reopened)) == 14
    assert 0.01 < (logits(reopened) - logits(opened)).norm() / logits(opened).norm() < 0.5


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_what_was_trained_for_is_what_merge_stores(kind: str, run, capsys) -> None:
    folder = run(kind)
    command = ["merge", str(folder.path), "--quantize", "int4"]
    assert main.main([*command, "--dtype", "float32"]) == 0
    assert "IntxWeightOnlyConfig: int4 in groups of 32 (quantized)" in capsys.readouterr().out
    report = folder.read("merge.json")["merged-int4"]
    assert report["against_tuned"]["relative"] < 1e-5, "the trained model, and not near it"
    assert report["against_merged"]["relative"] > 0.01
    scores = report["scores"]
    assert set(scores) == {"tuned", "quantized", "merged" if kind == "lora" else "unrounded"}
    assert scores["tuned"] == folder.read("eval.json")["tuned"]
    assert scores["quantized"]["loss"] == pytest.approx(scores["tuned"]["loss"], rel=1e-6)
    assert main.main([*command[:-1], "int8"]) == 2
    said = capsys.readouterr().err
    assert "trained for another quantization" in said and "help:      --quantize int4" in said


def test_merged_alone_it_is_proven_against_whole_weights(run, capsys) -> None:
    folder = run("lora")
    assert main.main(["merge", str(folder.path)]) == 0
    assert "not quantized: see --quantize" in capsys.readouterr().out
    assert folder.read("merge.json")["merged"]["against_tuned"]["relative"] < 0.2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["speed.qat.config=IntxWeightOnlyConfg"],
            ["no config with this name", "help:      speed.qat.config=IntxWeightOnlyConfig"],
        ),
        (["speed.qat.config=Int4WeightOnly"], ["only for NVIDIA GPUs", " or IntxWeightOnlyConfig"]),
        (["speed.qat.config=Int8WeightOnlyConfig"], ["no quantization-aware training for this config"]),
        (["speed.qat={config: IntxWeightOnly, group_sise: 32}"], ["speed.qat.group_sise", "group_size"]),
        (["speed.qat={config: IntxWeightOnly, granularity: 32}"], ["PerGroup(32)"]),
        (
            ["speed.qat={config: IntxWeightOnly, weight_dtype: int3}"],
            ["speed.qat.weight_dtype", "help:      speed.qat.weight_dtype=int"],
        ),
        (["speed.qat={}"], ["speed.qat.config: the recipe lacks this required key"]),
        (
            [INTX, "adapter.type=qlora"],
            ["adapter.type", "excludes a quantized base model", "help:      adapter.type=lora"],
        ),
        (
            [INTX, "model.quantization=torchao_int8"],
            ["model.quantization", "excludes a quantized base model"],
        ),
        ([INTX, "adapter.type=oft"], ["does not support oft", "adalora or ia3 or full"]),
        ([INTX, "adapter.type=prompt_tuning"], ["does not support prompt_tuning"]),
        ([INTX, "adapter.lora_dropout=0.1"], ["adapter.lora_dropout", "excludes LoRA dropout"]),
        ([INTX, "adapter.init_lora_weights=pissa"], ["adapter.init_lora_weights"]),
    ],
)
def test_what_does_not_go_together_is_said(overrides: list[str], said: list[str], capsys) -> None:
    assert main.main(["check", str(QUICKSTART), *overrides]) == 2
    printed = capsys.readouterr().err
    assert all(text in printed for text in said), printed
    assert printed.count("error:") == 1


def test_without_torchao_the_pip_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr("finetune.core.packages.installed", lambda name: name != "torchao")
    assert main.main(["check", str(QUICKSTART), INTX]) == 3
    assert "pip install -e '.[quantize]'" in capsys.readouterr().err
    with pytest.raises(UserError) as raised:
        qat.prepare(base(), Qat(config="IntxWeightOnly"))
    assert raised.value.code == 3


def test_widths_that_don_t_divide_are_named() -> None:
    with pytest.raises(UserError, match=r"group size does not divide the inputs(.|\n)*96; ") as raised:
        qat.prepare(base(), Qat(config="IntxWeightOnly", group_size=96))
    assert "gate_proj (256)" in str(raised.value)


# PEFT says that a bias can't be merged where the layer has none (peft 0.21.2, tuners/lora/layer.py)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_a_layer_whose_merged_weight_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="does not support this adapter layer"):
        adapted("lora", Qat(config="IntxWeightOnly"), lora_bias=True)


def test_rounding_that_does_nothing_ends_the_run() -> None:
    """As if torchao's quantizers were switched off."""
    model, checks = qat.prepare(base(), Qat(config="IntxWeightOnly")), RunChecks()
    watch = qat.Watch(model)
    for layer in qat.rounding(model).values():
        layer.weight_fake_quantizer.enabled = False
    logits(model)
    watch.add_run_check(checks)
    with pytest.raises(UserError, match="fake quantization in step 1"):
        checks.check()


def test_our_words_for_torchao_s_configs_are_torchao_s() -> None:
    """Names and fields as installed; each that is refused is refused for the reason that is given."""
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import quant_api

    classes = {name: kind for name, kind in vars(quant_api).items() if isinstance(kind, type)}
    here = {name for name, kind in classes.items() if kind.__module__ == quant_api.__name__}
    real = {name for name in here if issubclass(classes[name], AOBaseConfig)} - {"ModuleFqnToConfig"}
    assert {*QAT_CONFIGS} <= real
    assert real - {*QAT_CONFIGS, "FqnToConfig"} == qat_rules.REFUSED.keys() - {
        "Int8DynamicActivationInt4WeightConfig"
    }
    schema = json.loads(Path("finetune/recipe/recipe.schema.json").read_text())
    assert schema["$defs"]["Qat"]["properties"]["config"]["enum"] == [*QAT_CONFIGS]


@pytest.mark.parametrize("name", sorted(qat_rules.REFUSED))
def test_what_is_refused_can_t_be_had(name: str) -> None:
    from torchao import quantization
    from torchao.quantization.qat import QATConfig

    if not hasattr(quantization, name):
        assert "has removed this config" in qat_rules.REFUSED[name]
        return
    trains = "only for NVIDIA GPUs" in qat_rules.REFUSED[name]
    layer = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False))
    config = getattr(quantization, name)()
    try:
        quantization.quantize_(layer, QATConfig(config, step="prepare"))
        prepared = True
    except ValueError:
        prepared = False
    assert prepared == trains
    if prepared and not torch.cuda.is_available():
        with pytest.raises((ImportError, AssertionError)):
            quantization.quantize_(layer, QATConfig(config, step="convert"))


def test_doctor_says_what_becomes_of_it() -> None:
    from finetune.cli import doctor_optimizations
    from finetune.hardware import detection

    def row(*overrides: str) -> doctor_optimizations.Optimization:
        asked = loader.load(QUICKSTART, overrides)
        (found,) = (
            o for o in doctor_optimizations.optimizations(asked, detection.detect()) if o.where == "speed.qat"
        )
        return found

    assert row().state == "off" and row(INTX).state == "active" and "int4 in groups of 32" in row(INTX).why

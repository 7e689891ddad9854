"""What in a launch contradicts a recipe, the machine or itself, and the run checks of a launch."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig

from finetune.autoconfig import launch_settings, machine_setup, optimizer_choice
from finetune.autoconfig.launch_settings import Launch
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.distributed import launch_environment
from finetune.hardware import detection
from finetune.hardware.detection import Hardware
from finetune.planning import planned_machine, planner, sharding_cost
from finetune.preflight import checker, choice_checks, launch_conflicts
from finetune.recipe import loader, upstream_options
from finetune.recipe.schema import Speed
from finetune.training import launch_checks
from support.launches import FSDP, H100, PARALLEL, ZERO, unchecked_recipe
from support.paths import QUICKSTART, ROOT

H200 = Hardware("cuda", "NVIDIA H200", 8, (9, 0), 139.8, 96)
T4 = Hardware("cuda", "Tesla T4", 1, (7, 5), 15.0, 4)
CPU = Hardware("cpu", "CPU", 1, (0, 0), 16.0, 8)
SHAPES = {
    "1b": (2048, 8192, 16, 32, 128256),
    "3b": (3072, 8192, 28, 24, 128256),
    "8b": (4096, 14336, 32, 32, 128256),
    "70b": (8192, 28672, 80, 64, 128256),
}


def of(shape: str) -> LlamaConfig:
    hidden, wide, layers, heads, vocabulary = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=vocabulary, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """`launched(**variables)`: as in a process of such a launch."""

    def make(**variables: str) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


def problems(kind: str = "lora", machine: Hardware = H100, **speed: Any) -> str:
    own = {key: speed.pop(key) for key in ("packing", "streaming") if key in speed}
    model = {"name": "m", "quantization": speed.pop("quantization", "auto")}
    recipe = unchecked_recipe(kind, model=model, data={"name": "d", **own}, speed=speed)
    found = launch_conflicts.check_all(recipe, machine)
    assert all("accelerate config" in p.what and (p.found or p.key) and p.fix for p in found), "both sides"
    return "\n".join(map(str, found))


CONTRADICTIONS = {
    "an 8-bit base under fp8": ({}, {"quantization": "int8"}, "fp8 base model, and the recipe says int8"),
    "qlora under fp8": ({}, {"kind": "qlora"}, "the recipe says nf4"),
    "full on a frozen base": ({}, {"kind": "full"}, "8xh100_fp8_torchao"),
    "TE splits nothing": (
        {"ACCELERATE_FP8_BACKEND": "TE", **FSDP},
        {"kind": "full"},
        "TE of the accelerate config needs whole weights",
    ),
    "TE un-freezes": ({"ACCELERATE_FP8_BACKEND": "TE"}, {}, "requires_grad=True"),
    "AO on an adapter": ({"ACCELERATE_FP8_BACKEND": "AO"}, {}, "8xh100_fp8.yaml"),
    "lower case": ({"ACCELERATE_FP8_BACKEND": "te"}, {}, "backend: TE"),
    "TE with compile": (
        {"ACCELERATE_FP8_BACKEND": "TE"},
        {"kind": "full", "compile": True},
        "breaks the graph",
    ),
    "TE runs a layer again": (
        {"ACCELERATE_FP8_BACKEND": "TE"},
        {"kind": "full", "activation_checkpointing": "full"},
        "applies only in the forward pass",
    ),
    "TE and layers on the CPU": (
        {"ACCELERATE_FP8_BACKEND": "TE"},
        {"kind": "full", "offload": "activations"},
        "speed.offload",
    ),
    "TE on rows of any length": (
        {"ACCELERATE_FP8_BACKEND": "TE"},
        {"kind": "full", "packing": True, "streaming": True},
        "data.streaming",
    ),
    "TE's own default": (
        {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent"},
        {"kind": "full"},
        "amax_compute_algo: max",
    ),
    "an option that TE has not": (
        {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_INTERVAL": "4"},
        {"kind": "full"},
        "interval: 1",
    ),
    "AO's all-gather": ({"ACCELERATE_FP8_BACKEND": "AO"}, {"kind": "full"}, "nothing would train"),
    "codes by rank 0 alone": (
        {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
        {},
        "can't send a base model in fp8",
    ),
    "fp8 under DeepSpeed": (ZERO, {}, "DeepSpeed does not support mixed_precision: fp8"),
}
MORE = {
    "FSDP on the CPU": (FSDP, {"machine": CPU}, "uses plain DDP"),
    "FSDP1": ({**FSDP, "FSDP_VERSION": "1"}, {}, "fsdp_version: 2"),
    "recomputed twice": ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "both recompute layers"),
    "compiled twice": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "speed.compile"),
    "codes by rank 0": ({**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {"kind": "qlora"}, "quantized"),
    "int8 in parts": (FSDP, {"quantization": "int8"}, "can't shard a base model in int8"),
    "codes under ZeRO-3": (ZERO, {"quantization": "fp8"}, "can't train on a base model in fp8"),
    "DeepSpeed as DDP": ({**ZERO, "ACCELERATE_USE_CPU": "true"}, {"machine": CPU}, "uses plain DDP"),
    "DeepSpeed's 16 bits": (ZERO, {"machine": CPU}, "supports 16-bit precision only on GPUs"),
    "AdaLoRA in parts": (ZERO, {"kind": "adalora"}, "AdaLoRA's ranks"),
    "tensor parallel": ({**PARALLEL, "PARALLELISM_CONFIG_TP_SIZE": "2"}, {}, "tp_size"),
    "sequence parallel": ({**PARALLEL, "PARALLELISM_CONFIG_SP_SIZE": "2"}, {}, "sp_size"),
    "a packed row cut": ({**PARALLEL, "PARALLELISM_CONFIG_CP_SIZE": "2"}, {"packing": True}, "data.packing"),
    "copies of parts": ({**PARALLEL, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, {}, "fsdp2_8.yaml"),
    "DeepSpeed's own file": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, {}, "ds.json",
    ),
    "one process started": ({"MASTER_ADDR": "127.0.0.1"}, {}, "the launcher started one"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_an_fp8_launch_and_the_recipe_must_mean_the_same(case: str, launched) -> None:
    variables, section, said = CONTRADICTIONS[case]
    launched(**{"ACCELERATE_MIXED_PRECISION": "fp8", **variables})
    assert said in problems(**section)


@pytest.mark.parametrize("case", MORE)
def test_a_launch_that_contradicts_the_recipe_or_itself(case: str, launched, monkeypatch) -> None:
    variables, section, said = MORE[case]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launched(**variables)
    assert said in problems(**section)


def test_rows_that_processes_share_can_be_cut(launched) -> None:
    """Context parallelism gives each a piece of the beginning and one of the end, all as long."""
    assert launch_environment.row_options(flat=False) == {}
    launched(**PARALLEL, PARALLELISM_CONFIG_CP_SIZE="4")
    assert (
        upstream_options.fields(upstream_options.SFT_CONFIG).keys()
        >= launch_environment.row_options(flat=False).keys()
    )
    assert launch_environment.row_options(flat=False) == {"pad_to_multiple_of": 8}
    eight = Launch("accelerate", 8, 0, "bf16", "launch", "")
    assert (eight.sharing, eight.data_parallel_size) == (4, 2)


def test_row_options_keep_the_multiples_of_a_kernel_and_of_the_launch(launched) -> None:
    assert launch_environment.row_options(flat=False, kernel_multiple=64) == {"pad_to_multiple_of": 64}
    launched(**PARALLEL, PARALLELISM_CONFIG_CP_SIZE="3")
    assert launch_environment.row_options(flat=False, kernel_multiple=64) == {"pad_to_multiple_of": 192}


def test_transformer_engine_is_given_tokens_that_its_products_take(launched) -> None:
    """Multiples of 16 of padded rows; of rows end to end one number, also where a step is divided."""
    launched(ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="TE")
    assert launch_environment.row_options(flat=False) == {"pad_to_multiple_of": 16}
    assert launch_environment.row_options(flat=True) == {}


@pytest.mark.parametrize("window", [64, None])
def test_a_sliding_window_is_not_cut(window: int | None, launched, tmp_path) -> None:
    """Accelerate says so by a traceback, once the weights are loaded."""
    config = MistralConfig(
        sliding_window=window, hidden_size=32, num_attention_heads=2, num_key_value_heads=2
    )
    config.save_pretrained(tmp_path)
    loaded = loader.load(QUICKSTART, [f"model.name={tmp_path}", "model.attention=sdpa"])
    launch_conflicts.check_launch(loaded)
    launched(**PARALLEL, PARALLELISM_CONFIG_CP_SIZE="2")
    refused = pytest.raises(UserError, match="cut the model's sliding window")
    with refused if window else contextlib.nullcontext():
        launch_conflicts.check_launch(loaded)


@pytest.mark.parametrize(
    ("variables", "rate", "base", "said"),
    [
        (FSDP, 4e-3, "auto", True),
        (FSDP, 1e-1, "auto", False),
        (FSDP, 4e-3, "nf4", False),
        ({}, 4e-3, "auto", False),
    ],
)
def test_ia3_is_told_where_its_factors_are_rounded(
    variables: dict[str, str], rate: float, base: str, said: bool, launched
) -> None:
    launched(**variables)
    given = ["adapter.type=ia3", f"train.learning_rate={rate}", f"model.quantization={base}"]
    asked = loader.load(QUICKSTART, given)
    shown = checker.check_without_examples(asked)
    assert ("rounds IA3's factors" in " ".join(shown)) == said


def test_options_that_want_whole_weights(launched) -> None:
    launched(**FSDP)
    given = ["adapter.init_lora_weights=pissa", "adapter.loraplus_lr_ratio=16"]
    with pytest.raises(UserError) as raised:
        launch_conflicts.check(loader.load(QUICKSTART, [*given, "eval.eval_steps=10"]), H100)
    found = {problem.key for problem in raised.value.problems}
    assert found == {"adapter.init_lora_weights", "adapter.loraplus_lr_ratio", "eval.eval_steps"}


@pytest.mark.parametrize(
    ("split", "optim", "refused"),
    [
        (FSDP, "adamw_8bit", True),
        (FSDP, "paged_adamw_8bit", True),
        (FSDP, "adamw_torch_8bit", False),  # torchao's know FSDP's parts
        (FSDP, "adamw_torch_fused", False),
        (ZERO, "adamw_8bit", False),  # by ZeRO it steps on flattened parts: trained on the CPU
    ],
)
def test_optimizers_that_take_tensors_whole(
    split: dict[str, str], optim: str, refused: bool, launched, monkeypatch
) -> None:
    launched(**split)
    monkeypatch.setattr(detection, "detect", lambda: H100)
    asked: dict[str, Any] = {"attention": "sdpa", "base": "none", "adapter_type": "lora"}
    setup = machine_setup.choose(**asked, model=machine_setup.ModelProperties(against_fp8=""))
    train = loader.load(QUICKSTART, [f"train.optim={optim}"]).train
    if not refused:
        optimizer_choice.check(train, Speed(), setup)
        return
    with pytest.raises(UserError, match="does not work with FSDP") as raised:
        optimizer_choice.check(train, Speed(), setup)
    assert raised.value.code == 3 and raised.value.problems[0].key == "train.optim"


def test_a_batch_is_not_searched_where_weights_are_split(launched) -> None:
    """Said before any weight is loaded."""
    launched(**FSDP)
    given = ["train.per_device_train_batch_size=auto"]
    with pytest.raises(UserError, match="search runs before FSDP shards the weights") as raised:
        launch_conflicts.check_launch(loader.load(QUICKSTART, given))
    assert raised.value.code == 2


def test_more_processes_than_gpus(launched) -> None:
    launched(LOCAL_WORLD_SIZE="16")
    assert "16 processes, 8 GPUs" in problems()
    launched(LOCAL_WORLD_SIZE="8")
    assert problems() == ""


def test_an_fp8_launch_is_the_frozen_base_in_a_bf16_accelerator(launched, monkeypatch) -> None:
    monkeypatch.setattr(detection, "detect", lambda: H100)
    launched(ACCELERATE_MIXED_PRECISION="fp8")
    asked: dict[str, Any] = {"attention": "sdpa", "base": "auto"}
    setup = machine_setup.choose(
        **asked, adapter_type="dora", model=machine_setup.ModelProperties(against_fp8="too narrow")
    )
    assert (setup.launch.precision, setup.launch.fp8) == ("bf16", launch_environment.FROZEN)
    assert setup.storage == ("fp8", "the launch's mixed_precision: fp8") and problems("dora") == ""
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "False")
    setup = machine_setup.choose(
        **asked, adapter_type="full", model=machine_setup.ModelProperties(against_fp8="")
    )
    assert (setup.launch.precision, setup.storage.value) == ("fp8", "fp32") and problems("full") == ""
    for machine in (T4, CPU):  # Accelerate would take fp16 with a warning
        with pytest.raises(UserError, match="needs a GPU with fp8 GEMMs") as raised:
            launch_settings.read(machine)
        assert raised.value.code == 3


@pytest.mark.parametrize(
    "given",
    [
        ("adapter.init_lora_weights=orthogonal",),
        ("adapter.init_lora_weights=pissa",),
        ("adapter.modules_to_save=[q_proj]",),
        ("adapter.target_modules=[v_proj]", "adapter.target_parameters=[q_proj.weight]"),
        ("speed.qat={config: IntxWeightOnlyConfig, weight_dtype: int4, group_size: 32}",),
    ],
)
def test_an_fp8_launch_refuses_what_an_fp8_base_is_refused_for(
    given: tuple[str, ...], launched, monkeypatch
) -> None:
    monkeypatch.setattr(detection, "detect", lambda: H100)
    loaded = loader.load(QUICKSTART, given)
    launch_conflicts.check_launch(loaded)
    launched(ACCELERATE_MIXED_PRECISION="fp8")
    with pytest.raises(UserError) as raised:
        choice_checks.setup_of(loaded)
    assert raised.value.code == 2 and "accelerate config" in raised.value.problems[0].what
    with pytest.raises(UserError) as said:  # the recipe itself
        loader.load(QUICKSTART, [*given, "model.quantization=fp8"])
    keys = [{problem.key for problem in one.value.problems} for one in (raised, said)]
    assert keys[0] == keys[1]


def test_torchaos_layers_and_what_is_left_of_the_optimizer(monkeypatch) -> None:
    """On a real model, the run check finds the parameters that torchao's conversion stops from training."""
    import torch
    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "True")
    launch = Launch("accelerate", 1, 0, "fp8", "launch", "", fp8="AO")
    for gathers in (True, False):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                vocab_size=64,
            )
        )
        optimizer = torch.optim.AdamW(model.parameters())
        checks = RunChecks()
        prepared = launch_checks.PreparedModelChecks(launch, SimpleNamespace(model=model), checks)
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, pad_inner_dim=True)
        convert_model_to_fp8_ao(model, config=config)
        given: Any = {"model": model, "optimizer": optimizer}
        if not gathers:
            prepared.on_train_begin(None, None, None, **given)
            assert checks.entries[-1].actual == "13 torchao layers, 2 plain"
            continue
        with pytest.raises(UserError, match="tensors that the optimizer holds"):
            prepared.on_train_begin(None, None, None, **given)


def test_layers_of_transformer_engine_that_rounded_nothing_end_the_run() -> None:
    """By what its products keep (`fp8_meta`, as 2.20 has it), which is zeros and ones until one ran."""
    import torch

    names = ("Linear", "Linear", "LayerNorm")
    of = {"__module__": "transformer_engine.pytorch.module.linear"}
    model = torch.nn.ModuleList([type(name, (torch.nn.Module,), of)() for name in names])
    for layer in model[:2]:
        states = [SimpleNamespace(amax_history=torch.zeros(16, 3), scale=torch.ones(3)) for _ in range(2)]
        layer.__dict__["fp8_meta"] = dict(zip(("scaling_fwd", "scaling_bwd"), states, strict=True))
    launch, state = Launch("accelerate", 1, 0, "fp8", "launch", "", fp8="TE"), SimpleNamespace(global_step=1)
    for number in range(3):
        checks = RunChecks()
        prepared = launch_checks.PreparedModelChecks(launch, SimpleNamespace(model=model), checks)
        with pytest.raises(UserError) if number < 2 else contextlib.nullcontext():
            prepared.on_step_end(None, state, None, model=model)
        prepared.on_step_end(None, state, None, model=model)
        (check,) = checks.entries
        assert (check.actual, check.passed) == (f"{number} layers", number == 2)
        if number < 2:
            meta: Any = model[number].fp8_meta
            meta["scaling_fwd"].amax_history[-1] = 3.0
            meta["scaling_bwd"].scale += number + 1


@pytest.mark.parametrize(
    ("shape", "given", "machine", "chosen"),
    [
        ("8b", ("model.quantization=none",), H100, "ddp_8"),
        ("8b", ("adapter.type=full",), H100, "fsdp2_8"),
        ("70b", ("model.quantization=none",), H200, "fsdp2_8"),
        ("70b", ("model.quantization=fp8",), H200, "ddp_8"),
        ("70b", ("model.quantization=fp8",), H100, "fsdp2_8_quantized"),
        ("70b", ("adapter.type=qlora",), H100, "ddp_8"),
    ],
)
def test_the_base_is_split_only_where_it_does_not_fit(
    shape: str, given: tuple[str, ...], machine: Hardware, chosen: str, tmp_path
) -> None:
    """The plan says which, and it is the one that `finetune train` starts."""
    of(shape).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "a few words"}\n' * 9)
    asked = [f"model.name={tmp_path}/model", f"data.name={tmp_path}/rows.jsonl", "data.validation=null"]
    asked += ["data.format=text", "data.train_on=all", "adapter.type=lora", "data.max_length=8192"]
    asked += ["train.effective_batch_size=8", "train.per_device_train_batch_size=1", *given]
    loaded = loader.load(QUICKSTART, [*asked, *given])
    made = planner.make(loaded, machine, 8)
    name, reason = made.choices["launch"]
    assert name == chosen and "8 GPUs" in reason and ("DDP" if name == "ddp_8" else "FSDP2") in reason
    assert made.fits and made.by.weights == (name != "ddp_8")
    assert f"{made.peak:.0f} GiB" in reason


def test_the_competition_s_numbers() -> None:
    """16 rows x 8 GPUs x 2 accumulated; 69 steps are one epoch of 9 M tokens, and five are 343."""
    from finetune.autoconfig.batch_size import split_batch

    for name, epochs in (("as_submitted", 1), ("five_epochs", 5)):
        loaded = loader.load(ROOT / "recipes" / "isc25" / f"{name}.yaml")
        assert split_batch(loaded.train, 8) == (256, 16, 2)
        tokens = 256 * loaded.data.max_length
        assert loaded.train.max_steps == round(epochs * 9e6 / tokens)
        assert (loaded.adapter.type, loaded.model.attention) == ("dora", "flash_attention_3")


@pytest.mark.parametrize(
    ("name", "config", "shape", "gpu"),
    [
        ("as_submitted", "8xh100_fp8", "8b", "h100-80gb"),
        ("five_epochs", "8xh100_fp8", "8b", "h100-80gb"),
        ("transformer_engine", "8xh100_fp8_te", "1b", "h100-80gb"),
        ("transformer_engine", "8xh100_fp8_te", "3b", "h200"),
    ],
)
def test_the_competition_s_recipes_fit(name: str, config: str, shape: str, gpu: str, tmp_path) -> None:
    of(shape).save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 20_000}) + "\n")
    given = [f"model.name={tmp_path}", f"data.name={tmp_path}/rows.jsonl", "data.format=text"]
    given += ["data.validation_fraction=null", "model.attention=auto"]
    loaded = loader.load(ROOT / "recipes" / "isc25" / f"{name}.yaml", given)
    by, processes = sharding_cost.of_config(ROOT / "accelerate_configs" / f"{config}.yaml")
    made = planner.make(loaded, *planned_machine.find(gpu, processes), by=by)
    assert made.fits, f"{made.peak:.0f} GiB"

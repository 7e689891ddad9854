"""Values of a launch that would end in Accelerate's or DeepSpeed's own error, once the weights are loaded."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.autoconfig import machine_setup
from finetune.core.errors import Exit, UserError
from finetune.hardware import detection
from finetune.preflight import launch_conflicts
from finetune.recipe import loader
from finetune.training import resume_facts
from support.launches import FSDP, H100, PARALLEL, ZERO, unchecked_recipe
from support.paths import QUICKSTART

TWO, CUT = {"WORLD_SIZE": "2"}, {"PARALLELISM_CONFIG_CP_SIZE": "2"}
TE = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"}
REFUSED = {  # name -> what the launch says, adapter.type, speed, what is said
    "what layers share": (FSDP, "vblora", {}, "several layers share"),
    "vectors of a net": (FSDP, "p_tuning", {}, "network that makes"),
    "vectors of a net under ZeRO-3": (ZERO, "prompt_tuning", {}, "network that makes"),
    "buffers from rank 0": (
        {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "vera", {}, "fsdp2_8_quantized.yaml",
    ),
    "ZeRO-0": ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "lora", {}, "zero_stage: 2`"),
    "ZeRO-7": ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "7"}, "lora", {}, "zero_stage: 2`"),
    "fp8 of every weight under DeepSpeed": (
        {**ZERO, **TE, "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max"}, "full", {}, "8xh100_fp8_torchao.yaml",
    ),
    "sizes of four, two processes": (
        {**FSDP, **PARALLEL, **TWO, "PARALLELISM_CONFIG_CP_SIZE": "4"}, "lora", {}, "--num_processes 4",
    ),
    "sizes of two by two, two processes": (
        {**FSDP, **PARALLEL, **TWO, **CUT, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        "lora", {}, "--num_processes 4",
    ),
    "a row cut, nothing split": (
        {**PARALLEL, **TWO, **CUT}, "lora", {}, "context_parallel_4.yaml",
    ),
    "nothing left to split": ({**FSDP, **PARALLEL, **TWO}, "lora", {}, "dp_shard_size"),
    "blocks of TransformerEngine's": (
        {**TE, "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max", "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "True"},
        "full", {}, "use_mxfp8_block_scaling: False",
    ),
    "fp32 on an fp8 base": (
        {"ACCELERATE_MIXED_PRECISION": "no"}, "lora", {"quantization": "fp8"}, "model.quantization",
    ),
    "fp16 on an fp8 base": (
        {"ACCELERATE_MIXED_PRECISION": "fp16"}, "lora", {"quantization": "fp8"}, "model.quantization",
    ),
}  # fmt: skip
TAKEN = {
    "a norm that the recipe gives": {**ZERO, "ACCELERATE_GRADIENT_CLIPPING": "auto"},
    "sizes of two, two processes": {**FSDP, **PARALLEL, **TWO, **CUT},
    "buffers, read by each rank": {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"},
    "ZeRO-1": {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
}


def problems(variables: dict[str, str], kind: str, given: dict[str, str], monkeypatch) -> list[str]:
    for name, value in {"ACCELERATE_MIXED_PRECISION": "bf16", **variables}.items():
        monkeypatch.setenv(name, value)
    sections: dict[str, Any] = {"model": {"name": "m", "attention": "sdpa"}, "data": {"name": "d"}}
    sections["speed"] = {}
    for key, value in given.items():
        sections["model" if key == "quantization" else "speed"][key] = value
    found = launch_conflicts.check_all(unchecked_recipe(kind, **sections), H100)
    assert all("accelerate config" in p.what and (p.found or p.key) and p.fix for p in found), "both sides"
    return list(map(str, found))


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_end_later_is_refused(case: str, monkeypatch) -> None:
    variables, kind, speed, said = REFUSED[case]
    (found,) = problems(variables, kind, speed, monkeypatch)
    assert said in found


@pytest.mark.parametrize("case", TAKEN)
def test_what_the_recipe_leaves_to_the_launch(case: str, monkeypatch) -> None:
    assert not problems(TAKEN[case], "lora", {}, monkeypatch)


@pytest.mark.parametrize(("backend", "other"), [("TE", "8xh100_fp8_torchao"), ("AO", "8xh100_fp8_te")])
def test_where_fp8_s_package_is_missing_the_other_is_advised(backend: str, other: str, monkeypatch) -> None:
    """Not the frozen base, which `full` is refused on."""
    variables = {**TE, "ACCELERATE_FP8_BACKEND": backend, "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max"}
    variables["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] = "false"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch_conflicts, "installed", lambda package: False)
    asked = loader.load(QUICKSTART, ["adapter.type=full", "train.learning_rate=1e-4"])
    with pytest.raises(UserError) as raised:
        launch_conflicts.check(asked, H100)
    assert raised.value.code == Exit.ENVIRONMENT and other in raised.value.problems[0].fix


@pytest.mark.parametrize(
    ("launch", "name", "values"),
    [
        ({}, "ACCELERATE_USE_DEEPSPEED", ("false", "true")),
        (ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE", ("1", "2")),
        (ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", ("cpu", "none")),
        (FSDP, "FSDP_RESHARD_AFTER_FORWARD", ("true", "false")),
        ({**FSDP, **PARALLEL}, "PARALLELISM_CONFIG_CP_SIZE", ("2", "4")),
        ({**FSDP, **PARALLEL}, "PARALLELISM_CONFIG_CP_COMM_STRATEGY", ("allgather", "alltoall")),
    ],
)
def test_machines_that_are_launched_otherwise_are_told(launch, name, values, monkeypatch) -> None:
    """By what they compare at the start: their exchanges would not meet, or mean another thing."""
    monkeypatch.setattr(detection, "detect", lambda: H100)
    for variable, value in {"ACCELERATE_MIXED_PRECISION": "bf16", **launch}.items():
        monkeypatch.setenv(variable, value)
    held, loaded = [], loader.load(QUICKSTART)
    for value in values:
        monkeypatch.setenv(name, value)
        setup = machine_setup.choose(
            attention="sdpa",
            base="none",
            adapter_type="lora",
            model=machine_setup.ModelProperties(against_fp8=""),
        )
        held.append(resume_facts.facts(loaded, setup))
    assert held[0] != held[1]
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/scratch")
    assert resume_facts.facts(loaded, setup) == held[1]


def test_deepspeed_may_say_what_the_recipe_says(monkeypatch) -> None:
    """As `accelerate config` writes it; another value is refused, and what was expected is said."""
    loaded = loader.load(QUICKSTART)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    for clipping in ("auto", "1.0"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", clipping)
        launch_conflicts.check_launch(loaded)
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    with pytest.raises(UserError, match=r"contradicts train.max_grad_norm.*\n.*0.5\n.*expected: +1\n"):
        launch_conflicts.check_launch(loaded)


def test_vllm_is_not_started_by_each_process(monkeypatch) -> None:
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    loaded = loader.load(QUICKSTART, ["eval.engine=vllm", "eval.tasks=[arc_easy]"])
    with pytest.raises(UserError, match="each of the 2 processes would start its own vLLM") as raised:
        launch_conflicts.check_launch(loaded)
    assert raised.value.code == 2

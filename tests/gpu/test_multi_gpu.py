"""Each launch config on two GPUs beside one process: losses, and what is saved.

LoRA by Accelerate's launcher; other adapters in processes with the environment that it gives, forked from one
that has imported the libraries.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if torch.cuda.device_count() < 2:  # nothing of it is set up then
    pytest.skip("fewer than two GPUs", allow_module_level=True)

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from finetune.experiments.runner import worker_process
from finetune.run_folder.run_folder import RunFolder
from support import two_ranks
from support.faults import SCRIPT
from support.paths import MODEL, QUICKSTART, ROOT
from support.runs import metrics
from support.scripts import module_of
from support.tiny_models import save, sizes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.gpu]
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="no fp8 GEMMs")
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="no DeepSpeed")
needs_te = pytest.mark.skipif(not find_spec("transformer_engine_torch"), reason="no TransformerEngine")
FP8 = "model.quantization=fp8"
IA3 = ("adapter.type=ia3", "train.learning_rate=1e-1")  # its own: steps that bf16 does not round away
FULL = ("adapter.type=full", "train.learning_rate=5e-4")
LONG = ("model.attention=sdpa", "speed.activation_checkpointing=full")
GATHERED = ("sharded by FSDP", "quantized weights that FSDP gathers")
IN_FP8 = ("fp8 GEMMs", "model.quantization")
CHECKPOINTED = "speed.activation_checkpointing=full"
EACH = (("adapter.type=lora",), ("adapter.type=dora",), IA3, FULL)
# config, what the recipe says, relative difference of losses that is allowed, run checks that must be there
CASES = [
    ("ddp_2", ["adapter.type=lora"], 0.02, ("gradients all-reduced",)),
    ("ddp_2", ["adapter.type=dora"], 0.02, ("gradients all-reduced",)),
    ("ddp_2", ["adapter.type=adalora"], 0.02, ("AdaLoRA ranks",)),
    ("ddp_2", [*IA3], 0.02, ("gradients all-reduced",)),
    ("ddp_2", ["adapter.type=qlora"], 0.02, ("gradients all-reduced",)),
    ("multi_node", ["adapter.type=dora"], 0.02, ("gradients all-reduced",)),
    ("multi_node", ["adapter.type=adalora"], 0.02, ("AdaLoRA ranks",)),
    ("multi_node", [*IA3], 0.02, ("gradients all-reduced",)),
    ("multi_node", ["adapter.type=qlora"], 0.02, ("gradients all-reduced",)),
    ("multi_node", [*FULL], 0.02, ("gradients all-reduced",)),
    pytest.param("multi_node", ["adapter.type=lora", FP8], 0.03, ("fp8 GEMMs",), marks=needs_fp8),
    pytest.param("multi_node", ["adapter.type=dora", FP8], 0.03, ("fp8 GEMMs",), marks=needs_fp8),
    pytest.param("8xh100_fp8", ["adapter.type=lora"], 0.03, IN_FP8, marks=needs_fp8),
    pytest.param("8xh100_fp8", ["adapter.type=dora"], 0.03, IN_FP8, marks=needs_fp8),
    ("fsdp2_8", ["adapter.type=lora"], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8", ["adapter.type=dora"], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8", [*IA3], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8", ["adapter.type=lora", "data.packing=true", "data.max_length=512"], 0.03,
     ("packed examples isolated",)),
    ("fsdp2_8", ["adapter.type=lora", "speed.activation_checkpointing=full"], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8", ["adapter.type=lora", CHECKPOINTED, "speed.offload=activations"], 0.02,
     ("speed.offload",)),
    ("fsdp2_8", [*FULL], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_offload", ["adapter.type=lora"], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_offload", ["adapter.type=dora"], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_offload", [*IA3], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_offload", [*FULL], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_quantized", ["adapter.type=lora"], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_quantized", ["adapter.type=dora"], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_quantized", [*IA3], 0.02, ("sharded by FSDP",)),
    ("fsdp2_8_quantized", ["adapter.type=qlora"], 0.02, GATHERED),
    ("fsdp2_8_quantized", [*FULL], 0.02, ("sharded by FSDP",)),
    pytest.param("fsdp2_8_quantized", ["adapter.type=lora", FP8], 0.03, GATHERED, marks=needs_fp8),
    pytest.param("fsdp2_8_quantized", ["adapter.type=dora", FP8], 0.03, GATHERED, marks=needs_fp8),
    # vectors that are gathered in bf16 turn codes into the next ones
    pytest.param("fsdp2_8_quantized", [*IA3, FP8], 0.05, GATHERED, marks=needs_fp8),
    ("context_parallel_4", ["adapter.type=lora", *LONG], 0.02, ("sharded by FSDP",)),
    ("context_parallel_4", ["adapter.type=dora", *LONG], 0.02, ("sharded by FSDP",)),
    ("context_parallel_4", [*IA3, *LONG], 0.02, ("sharded by FSDP",)),
    ("context_parallel_4", [*FULL, *LONG], 0.02, ("sharded by FSDP",)),
    *[pytest.param("zero2_8", [*recipe], 0.03, ("precision",), marks=needs_deepspeed) for recipe in EACH],
    pytest.param("zero2_8", ["adapter.type=qlora"], 0.03, ("precision",), marks=needs_deepspeed),
    *[pytest.param("zero3_8", [*recipe], 0.03, ("precision",), marks=needs_deepspeed) for recipe in EACH],
    *[pytest.param("zero3_8_offload", [*recipe], 0.03, ("precision",), marks=needs_deepspeed)
      for recipe in EACH],
    pytest.param("8xh100_fp8_torchao", [*FULL], 0.05, ("fp8 layers", "fp8 GEMMs"), marks=needs_fp8),
    pytest.param("8xh100_fp8_te", [*FULL], 0.05, ("fp8 layers", "fp8 GEMMs", "fp8_config.fp8_format"),
                 marks=[needs_fp8, needs_te]),
]  # fmt: skip
STEPS = 6
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
# On a port that is free, so that tests can run side by side: pytest -n 8
LAUNCH = ("accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2")


def overrides(small: tuple[str, str], folder: Path, *given: str) -> list[str]:
    short = [f"train.max_steps={STEPS}", "train.warmup_steps=0", "train.effective_batch_size=8", *small]
    short += [
        f"model.name={MODEL}",
        "eval.max_new_tokens=4",
        "eval.forgetting=false",
        "train.logging_steps=1",
    ]
    return [*short, f"train.output_dir={folder}", *given]


def run(line: list[str], recipe: list[str], small: Any, folder: Path, **variables: str) -> RunFolder:
    """`finetune train` in processes of their own, by this launcher."""
    given = ["train", str(QUICKSTART), *overrides(small, folder, *recipe), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": PATHS, "FINETUNE_TIMEOUT_SECONDS": "120", **variables}
    done = subprocess.run(
        [sys.executable, "-m", *line, *given], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return RunFolder(folder)


def forked(recipe: list[str], small: Any, folder: Path, *, count: int = 2, **launch: str) -> RunFolder:
    """The same in forked processes."""
    words = ["train", str(QUICKSTART), *overrides(small, folder, *recipe), "--quiet"]
    given = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "FINETUNE_TIMEOUT_SECONDS": "120", **launch}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # also of the server: it may ask no GPU
    two_ranks.run(
        two_ranks.command, words, cwd=ROOT, count=count, preloaded=(*worker_process.PRELOADED,), **given
    )
    return RunFolder(folder)


@pytest.fixture
def one_gpu(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], RunFolder]:
    """A recipe's run on one GPU, made once for all workers of one `pytest -n`."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def made(recipe: list[str]) -> RunFolder:
        folder = shared / f"one-{zlib.crc32(' '.join(recipe).encode())}"
        with folder.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not (folder / "eval.json").exists():
                forked(recipe, small, folder, count=1, CUDA_VISIBLE_DEVICES="0")
            return RunFolder(folder)

    return made


@pytest.mark.parametrize(("name", "recipe", "allowed", "wanted"), CASES)
def test_two_gpus_learn_what_one_does(
    name: str,
    recipe: list[str],
    allowed: float,
    wanted: tuple[str, ...],
    small: Any,
    tmp_path: Path,
    one_gpu: Any,
) -> None:
    alone = [one for one in recipe if not one.startswith(("speed.activation_checkpointing", "speed.offload"))]
    one = one_gpu([*alone, *([FP8] if name == "8xh100_fp8" else [])])
    config = tmp_path / f"{name}.yaml"
    text = (ROOT / "accelerate_configs" / config.name).read_text()
    config.write_text(text.replace("parallelism_config_cp_size: 4", "parallelism_config_cp_size: 2"))
    if (
        recipe == ["adapter.type=lora"] or name == "8xh100_fp8_te"
    ):  # TransformerEngine loads as it is imported
        two = run([*LAUNCH, "--config_file", str(config), "-m", "finetune"], recipe, small, tmp_path / "two")
    else:
        launch = module_of("scripts", "launch_matrix").environment(config)
        two = forked(recipe, small, tmp_path / "two", CUDA_VISIBLE_DEVICES="0,1", **launch)
    found = {check["option"]: check for check in two.read("checks.json")}
    assert all(check["passed"] for check in found.values()) and found.keys() >= {"processes", *wanted}
    assert found["processes"]["actual"] == "2"
    # With DoRA, a changed bit turns fp8 codes into the next ones: 3.004% apart were seen in step 5
    late = 0.05 if recipe == ["adapter.type=dora", FP8] else allowed
    for step, (a, b) in enumerate(zip(metrics(one), metrics(two), strict=True), 1):
        assert b["loss"] == pytest.approx(a["loss"], rel=allowed if step <= 4 else late)
    whole(one, two, ranks="adapter.type=adalora" in recipe)
    if name.startswith("zero") and recipe[0] != FULL[0]:
        saved = load_file(two.adapter / "adapter_model.safetensors").values()
        assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
    assert json.loads((two.path / "eval.json").read_text())["tuned"]["loss"] > 0


@pytest.mark.parametrize(
    ("name", "storage"), [("ddp_2", "none"), ("ddp_2", "nf4"), ("ddp_2", "fp8"), ("fsdp2_8", "none")]
)
def test_two_gpus_train_experts_as_one_gpu_does(name: str, storage: str, small: Any, tmp_path: Path) -> None:
    """Adapters on stacked experts, which are quantized or not."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes(hidden_size=256, num_key_value_heads=2, **experts))
    model = save(tmp_path / "model", AutoModelForCausalLM.from_config(config))
    recipe = [f"model.name={model}", "adapter.target_modules=all-linear-and-experts"]
    recipe += [f"model.quantization={storage}", "speed.compile=false"]
    one = forked(recipe, small, tmp_path / "one", count=1, CUDA_VISIBLE_DEVICES="0")
    launch = module_of("scripts", "launch_matrix").environment(ROOT / "accelerate_configs" / f"{name}.yaml")
    two = forked(recipe, small, tmp_path / "two", CUDA_VISIBLE_DEVICES="0,1", **launch)
    checks = {check["option"]: check for check in two.read("checks.json")}
    assert all(check["passed"] for check in checks.values()) and checks["processes"]["actual"] == "2"
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.02)
    whole(one, two)


def whole(one: RunFolder, two: RunFolder, *, ranks: bool = False) -> None:
    """What two processes saved has every tensor that one saves, none a part of one, empty or all zero.

    Args:
        ranks: whether training gives them out, by sums that differ in rounding: their total is the same.
    """
    kind = "adapter_model" if one.adapter.exists() else "model"
    names = [next(run.weights.glob(f"{kind}*.safetensors")) for run in (one, two)]
    alone, saved = map(load_file, names)
    if ranks:
        total = [sum(t.shape[0] for n, t in made.items() if "lora_A" in n) for made in (alone, saved)]
        assert alone.keys() == saved.keys() and total[0] == total[1]
    else:
        assert {name: t.shape for name, t in alone.items()} == {name: t.shape for name, t in saved.items()}
    assert all(tensor.numel() and tensor.any() for tensor in saved.values())


@pytest.mark.parametrize("name", ["ddp_2", "fsdp2_8"])
def test_a_rank_that_hangs_ends_all_with_a_message(name: str, small: Any, tmp_path: Path) -> None:
    """Within the timeout, NCCL's minute and the launcher's half: by gloo's error, by NCCL's watchdog, or by
    the rank itself, where that one is slow."""
    config = str(ROOT / "accelerate_configs" / f"{name}.yaml")
    line = [sys.executable, "-m", "finetune.launch", *LAUNCH[1:], "--config_file", config]
    given = [SCRIPT, "hang step=3", "train", str(QUICKSTART)]
    given += [*overrides(small, tmp_path / "run"), "--quiet"]
    own = {"PYTHONPATH": f"{PATHS}:{ROOT / 'tests'}", "FINETUNE_TIMEOUT_SECONDS": "30"}
    done = subprocess.run(
        [*line, *given], env={**os.environ, **own}, cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr[-4000:]
    said = (
        "did not answer in time",
        "does not answer in time",
        "rank 0 failed first:\nerror: this process hung",
    )
    assert any(words in done.stderr[-1500:] for words in said), done.stderr[-4000:]


@pytest.mark.parametrize(
    "name", ["ddp_2", "fsdp2_8", *[pytest.param(f"zero{part}_8", marks=needs_deepspeed) for part in (2, 3)]]
)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_two_gpus_go_on_from_a_checkpoint(name: str, kind: str, small: Any, tmp_path: Path) -> None:
    """What FSDP splits is gathered whole, and divided again; ZeRO's parts are kept, and those in fp32."""
    config = str(ROOT / "accelerate_configs" / f"{name}.yaml")
    line = [*LAUNCH, "--config_file", config, "-m", "finetune"]
    given = [f"adapter.type={kind}", "train.learning_rate=1e-3", "train.save_steps=3"]
    straight, folder = run(line, given, small, tmp_path / "straight"), tmp_path / "again"
    shutil.copytree(straight.path / "checkpoints" / "step-3", folder / "checkpoints" / "step-3")
    shutil.copy(straight.path / "metrics.jsonl", folder)
    again = run(line, [*given, "--resume"], small, folder)
    for a, b in zip(metrics(straight), metrics(again), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
    whole(straight, again)


@pytest.mark.parametrize("name", ["ddp_2", "fsdp2_8"])
def test_out_of_memory_on_one_gpu_restarts_all_with_the_stronger_setting(
    name: str, small: Any, tmp_path: Path
) -> None:
    """Rank 1's allocator has no memory in the first forward; rank 0 waits for it in NCCL."""
    script = ROOT / "tests" / "support" / "short_of_memory.py"
    line = [*LAUNCH, "--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), str(script)]
    given = ["adapter.type=lora", "speed.compile=false", "speed.fused=false"]
    auto = run(line, given, small, tmp_path / "auto")
    told = run(line, [*given, "speed.activation_checkpointing=norms"], small, tmp_path / "told")
    found = {check["option"]: check for check in auto.read("checks.json")}
    corrected = found["speed.activation_checkpointing, auto after out of memory"]
    assert (corrected["expected"], corrected["actual"]) == ("none", "norms")
    assert (auto.path / "log.txt").read_text().count("the first step ran out of memory") == 1
    assert found["processes"]["actual"] == "2" and all(check["passed"] for check in found.values())
    for a, b in zip(metrics(told), metrics(auto), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("count", [2, 4])
def test_an_8b_under_fsdp2_fits_as_auto_chooses(count: int, tmp_path: Path) -> None:
    """LoRA in bf16, 4 x 4,096 tokens on each GPU, compiled: on GPUs of 80 GB it ran out of memory once. The
    checkpoint takes 16 GB in /tmp/finetune-gpu, as of benchmarks/multi_gpu.py."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")
    multi_gpu, inputs = module_of("benchmarks", "multi_gpu"), module_of("benchmarks", "gpu_inputs")
    options = SimpleNamespace(tiny=False, layers=None, steps=6, out=tmp_path, work=Path("/tmp/finetune-gpu"))
    options.work.mkdir(exist_ok=True)
    job = multi_gpu.plan("lora-bf16-fsdp2-compiled", count, options)
    inputs.make_model(job.model, "8b", "bf16", 32)
    inputs.make_data(job.data, (options.steps + 2) * job.batch * job.length, documents=False)
    found = multi_gpu.launch(job)
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert found.get("tokens_per_second", 0) > 5000 * count, found
    assert not found["corrected"] and found["peak_gib"] < 0.9 * memory, found
    assert memory > 100 or found["activation_checkpointing"] != "none"


def test_the_choice_for_this_machine_is_ddp_for_a_small_base(small: Any, tmp_path: Path) -> None:
    """`finetune train` alone: as many processes as GPUs, and the reason."""
    line = [sys.executable, "-m", "finetune", "train", str(QUICKSTART)]
    batch = f"train.effective_batch_size={8 * torch.cuda.device_count()}"
    given = overrides(small, tmp_path / "all", batch, "train.max_steps=1")
    done = subprocess.run(
        [*line, *given], env={**os.environ, "PYTHONPATH": PATHS}, cwd=ROOT, capture_output=True,
        text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "each GPU holds the whole base model (DDP)" in done.stdout and "ddp_8.yaml" in done.stdout

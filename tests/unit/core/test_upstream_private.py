"""Private names of other libraries: used in `core/upstream_private.py` only, each still there."""

from __future__ import annotations

import argparse
import ast
import datetime
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.quantizers.base import HfQuantizer
from transformers.utils import chat_template_utils
from trl.trainer.sft_trainer import SFTTrainer

from finetune.core import upstream_private
from support.paths import ROOT

PACKAGE = ROOT / "finetune"
MODULE = PACKAGE / "core" / "upstream_private.py"
# Ours that have a base class of upstream with protected names, by file: those of the class are allowed there
SUBCLASSES: dict[str, tuple[str, type]] = {
    "training/trainer.py": ("Trainer", SFTTrainer),
    "quantization/fp8_loading.py": ("Fp8BaseQuantizer", HfQuantizer),
    "quantization/fp8_linear.py": ("Fp8Linear", nn.Linear),
}
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}  # of NamedTuple and os: documented


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def own_names(trees: list[ast.Module]) -> set[str]:
    """Private names that our functions, classes and modules define, or set on themselves."""
    found = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names that a source uses of other modules, as it writes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | PUBLIC:
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("finetune"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (ast.unparse(node) for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            yield from (ast.unparse(node) for name in names if is_private(name))
        elif isinstance(node, ast.Call):
            texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
            names = [str(one).rpartition(".")[2] for one in texts if str(one).isidentifier()]
            named = ast.unparse(node.func).endswith(("getattr", "setattr", "hasattr", "delattr", ".pop"))
            names = [name for name in names if named and is_private(name) and name not in own | PUBLIC]
            yield from (ast.unparse(node) for _ in names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "._" in node.value:
            modules = node.value.split(".")
            if modules[0] in ("torch", "transformers", "trl", "peft", "accelerate", "datasets"):
                yield from (node.value for name in modules if is_private(name) and name.isidentifier())


def protected_names(path: Path, name: str) -> set[str]:
    """Private names that a class defines, or uses of itself and of its base class."""
    (found,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    defined = {n.name for n in ast.walk(found) if isinstance(n, ast.FunctionDef)}
    used = {
        n.attr
        for n in ast.walk(found)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self", "super()")
    }
    return {one for one in defined | used if is_private(one)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch._dynamo.reset()", ["torch._dynamo"]),
        ("from torch._inductor import cudagraph_trees", ["from torch._inductor import cudagraph_trees"]),
        ("from flash import _forward", ["from flash import _forward"]),
        ("import torch._C", ["import torch._C"]),
        ("getattr(model, '_commit_hash', None)", ["getattr(model, '_commit_hash', None)"]),
        ("vars(model).pop('_kept', None)", ["vars(model).pop('_kept', None)"]),
        ("import_module('torch._inductor')", ["torch._inductor"]),
        ("from finetune.core import _own\nself._own = record._replace(a=1)\n__name__", []),
    ],
)
def test_private_uses_finds_each_kind(text: str, found: list[str]) -> None:
    tree = ast.parse(text)
    assert list(private_uses(tree, own_names([tree]))) == found


def test_private_names_of_upstream_are_used_in_one_module_only() -> None:
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path != MODULE)
    trees = {path: ast.parse(path.read_text()) for path in paths}
    own, found = own_names(list(trees.values())), list[str]()
    for path, tree in trees.items():
        name = path.relative_to(PACKAGE).as_posix()
        allowed = protected_names(path, SUBCLASSES[name][0]) if name in SUBCLASSES else set[str]()
        found += [f"{name}: {use}" for use in private_uses(tree, own | allowed)]
    assert found == []


@pytest.mark.parametrize("file", SUBCLASSES)
def test_protected_names_that_a_subclass_uses_exist_in_its_base_class(file: str) -> None:
    name, base = SUBCLASSES[file]
    sources = [inspect.getsource(one) for one in base.__mro__ if one is not object]
    missing = [one for one in protected_names(PACKAGE / file, name) if not any(one in s for s in sources)]
    assert missing == []


@pytest.fixture
def model() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation="sdpa"))


def test_commit_hash_is_what_transformers_reads(model: Any) -> None:
    upstream_private.set_commit_hash(model.config, "abc")
    assert upstream_private.commit_hash(model.config) == "abc"
    assert upstream_private.commit_hash(LlamaConfig()) is None
    assert '"_commit_hash"' in inspect.getsource(inspect.getmodule(type(model.config).__mro__[1]))


def test_attention_name_is_what_the_layers_call(model: Any) -> None:
    assert upstream_private.attention_name(model.config) == "sdpa"
    upstream_private.set_attention_name(model.config, "eager")
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"
    assert "config._attn_implementation" in inspect.getsource(type(model.model.layers[0].self_attn))


def test_experts_name_is_what_transformers_sets(model: Any) -> None:
    model.set_experts_implementation("eager")
    assert upstream_private.experts_name(model.config) == "eager"


def test_names_of_experts_are_those_of_transformers() -> None:
    from transformers.integrations import deepgemm

    source = inspect.getsource(deepgemm)
    assert "self._is_expert_parallel" in source and "self._apply_gate(" in source


def test_modules_in_fp32_are_what_a_class_declares(model: Any) -> None:
    assert upstream_private.modules_in_fp32(model) == upstream_private.modules_always_in_fp32(model) == []
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = {"norm"}, {"gate"}
    assert upstream_private.modules_in_fp32(model) == ["norm"]
    assert upstream_private.modules_always_in_fp32(model) == ["gate"]


def test_weight_conversions_are_what_saving_reverts(model: Any) -> None:
    from transformers import core_model_loading

    model._weight_conversions = []
    upstream_private.forget_weight_conversions(model)
    assert "_weight_conversions" not in vars(model)
    assert '"_weight_conversions"' in inspect.getsource(core_model_loading.revert_weight_conversion)


def test_checkpoint_function_is_what_a_checkpointed_layer_is_called_through(model: Any) -> None:
    calls = []
    layer = model.model.layers[0]
    assert upstream_private.checkpoint_function(layer) is None
    model.gradient_checkpointing_enable({"use_reentrant": False})
    own = upstream_private.checkpoint_function(layer)
    upstream_private.set_checkpoint_function(layer, lambda *given: calls.append(1) or own(*given))
    model.train()(input_ids=torch.tensor([[1, 2]]))
    assert calls == [1]


def test_chat_template_environment_compiles_a_template() -> None:
    environment = upstream_private.chat_template_environment(chat_template_utils)
    assert environment.from_string("{{ 1 + 1 }}").render() == "2"


def test_with_reasoning_fields_gives_each_name() -> None:
    chat = [{"role": "assistant", "content": "a", "reasoning_content": "b"}]
    (message,) = upstream_private.with_reasoning_fields(chat_template_utils, chat)
    assert message["thinking"] == message["reasoning_content"] == "b"
    assert upstream_private.with_reasoning_fields(SimpleNamespace(), chat) == chat


def test_keep_on_one_gpu_sets_what_the_trainer_reads(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert arguments.n_gpu == 0
    arguments._n_gpu = 4
    upstream_private.keep_on_one_gpu(arguments)
    assert arguments.n_gpu == 1


def test_mark_step_skipped_is_what_the_schedule_reads() -> None:
    from accelerate import Accelerator

    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    assert isinstance(optimizer, AcceleratedOptimizer) and not optimizer.step_was_skipped
    upstream_private.mark_step_skipped(optimizer, True)
    assert optimizer.step_was_skipped


def test_launch_options_are_by_name() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_processes", type=int)
    assert upstream_private.launch_options(parser)["num_processes"].type is int


def test_set_rank_is_what_lm_eval_shares_out_by() -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-eval")
    lm = object.__new__(huggingface.HFLM)
    upstream_private.set_rank(lm, 1, 2)
    assert (lm.rank, lm.world_size) == (1, 2)


def test_end_loader_workers_ends_them() -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)  # pyright: ignore[reportArgumentType] (a list is a dataset)
    list(loader)
    workers = loader._iterator._workers
    upstream_private.end_loader_workers(loader)
    assert loader._iterator is None and not any(one.is_alive() for one in workers)


def test_updates_if_finite_is_of_fused_optimizers() -> None:
    for fused in (True, False):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=fused)
        assert upstream_private.updates_if_finite(optimizer) is fused


def test_actions_of_a_parser_are_its_options_and_arguments() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument_group("more").add_argument("--to", "-t")
    assert [(one.dest, one.option_strings) for one in upstream_private.actions_of(parser)] == [
        ("help", ["-h", "--help"]),
        ("run", []),
        ("to", ["--to", "-t"]),
    ]


def test_version_counts_changes_in_place() -> None:
    tensor = torch.zeros(1)
    before = upstream_private.version(tensor)
    tensor.add_(1)
    assert upstream_private.version(tensor) == before + 1


def test_compiled_modules_and_their_graphs_are_counted() -> None:
    class Layer(nn.Module):
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

    layer = Layer()
    assert not upstream_private.is_compiled(layer)
    torch.compiler.reset()
    upstream_private.compile_counters().clear()
    layer.compile(backend="eager")
    tensor = torch.ones(3, 2)
    upstream_private.mark_dynamic(tensor)
    layer(tensor)
    assert upstream_private.is_compiled(layer)
    assert upstream_private.compile_counters()["stats"]["unique_graphs"] == 1
    assert upstream_private.compile_counters()["graph_break"] == {}


def test_compile_settings_are_put_back() -> None:
    config = torch._dynamo.config
    before = config.optimize_ddp, config.recompile_limit
    with upstream_private.compile_settings():
        upstream_private.allow_graphs(before[1] + 5)
        assert (config.optimize_ddp, config.recompile_limit) == (False, before[1] + 5)
        upstream_private.allow_graphs(1)
        assert config.recompile_limit == before[1] + 5
    assert (config.optimize_ddp, config.recompile_limit) == before


def test_recorded_cuda_graphs_are_counted_by_torch() -> None:
    from torch._inductor import cudagraph_trees

    assert {"device_index", "create_if_none_exists"} <= {
        *inspect.signature(cudagraph_trees.get_manager).parameters
    }
    assert "graph_counter" in inspect.getsource(cudagraph_trees.CUDAGraphTreeManager.__init__)


def test_a_process_that_no_gpu_process_forked_may_use_a_gpu() -> None:
    assert upstream_private.cuda_was_used_before_fork() is False


def test_memory_of_a_gpu_is_recorded_by_these_functions() -> None:
    record = inspect.signature(torch.cuda.memory._record_memory_history)
    record.bind(max_entries=1)
    record.bind(enabled=None)
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("memory.pickle")


def test_scaled_mm_multiplies_fp8() -> None:
    """On CPUs that have the kernel; elsewhere the function is there."""
    assert callable(torch._scaled_mm)  # pyright: ignore[reportPrivateImportUsage] (a private function)
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scales = torch.full((16, 1), 2.0)
    try:
        made = upstream_private.scaled_mm(codes, codes.t(), scales, scales.t())
    except (RuntimeError, NotImplementedError):
        return
    assert made.dtype == torch.bfloat16 and torch.equal(made.float(), torch.full((16, 16), 64.0))


def test_operations_go_through_a_function_that_knows_which_reads_a_value() -> None:
    def answer(operation: Any, args: Any, options: Any) -> Any:
        return 7 if upstream_private.reads_a_value(operation) else operation(*args, **options)

    with upstream_private.operations_through(answer):
        assert torch.ones(1).item() == 7
    assert torch.ones(1).item() == 1


def test_foreach_functions_are_torch_s_one_by_one() -> None:
    one, other = [torch.full((2,), -2.0), torch.full((3,), -3.0)], [torch.ones(2), torch.ones(3)]
    assert [t[0].item() for t in upstream_private.foreach_mul(one, one)] == [4, 9]
    assert [t[0].item() for t in upstream_private.foreach_mul(one, 2.0)] == [-4, -6]
    assert [t[0].item() for t in upstream_private.foreach_sub(one, other)] == [-3, -4]
    upstream_private.foreach_abs_(one)
    upstream_private.foreach_mul_(one, 2.0)
    upstream_private.foreach_add_(one, other)
    assert [t[0].item() for t in one] == [5, 7]
    upstream_private.foreach_copy_(one, other)
    assert [t[0].item() for t in one] == [1, 1]


def test_ddp_and_process_groups_tell_what_they_hold(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        account = upstream_private.ddp_account(wrapped)
        assert account["num_parameter_tensors"] == 2 and account["bucket_sizes"] == "24"
        (group,) = upstream_private.process_groups()
        assert "gloo" in group[1]
        upstream_private.set_group_timeout(datetime.timedelta(seconds=5), group[0])
    finally:
        dist.destroy_process_group()


def test_replace_own_buffers_leaves_those_of_files() -> None:
    def module(value: float) -> nn.Module:
        found = nn.Module()
        found.register_buffer("computed", torch.tensor(value), persistent=False)
        found.register_buffer("absent", None, persistent=False)
        found.register_buffer("stored", torch.tensor(value))
        return found

    live = module(1.0)
    upstream_private.replace_own_buffers(live, module(2.0))
    assert (float(live.computed), float(live.stored)) == (2.0, 1.0)  # pyright: ignore[reportArgumentType] (buffers are tensors)


def test_flash_attention_4_has_both_functions() -> None:
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    assert all(map(callable, upstream_private.flash_attention_4()))


def test_modules_that_are_named_by_text_exist() -> None:
    import importlib

    assert importlib.import_module(upstream_private.PRELOADED)
    pytree = importlib.import_module(upstream_private.LOGS_ENUMS)
    assert isinstance(vars(pytree).get("log") or vars(pytree).get("logger"), logging.Logger)

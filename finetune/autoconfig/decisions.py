"""What `speed:` becomes for one model: the decision that a run, a plan and a check share.

A run describes its live model (`speed/live_model_spec.py`), a plan the model of a config
(`planning/planned_spec.py`). Like all of `autoconfig`, this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from finetune.autoconfig import compilation, cuda_graphs, memory_estimate
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from finetune.autoconfig.compilation import Work
    from finetune.autoconfig.memory_estimate import Keeps, Memory
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Speed


@dataclass(frozen=True)
class ModelSpec:
    """What decides on the speed and memory of a model with its adapter."""

    config: ModelConfig
    """The transformers config."""
    layers: int
    """Decoder layers; 0: they are not where transformers' decoders have them."""
    adapted: bool
    """An adapter trains, and not every parameter."""
    dtype: str
    """The dtype of plain weights: bfloat16."""
    codes: str = ""
    """How linear layers are stored where it matters here: fp8 or 4-bit."""
    trained: int = 0
    """Numbers that the optimizer moves, over all processes."""
    columns: bool = False
    """The adapter scales each output by a trained vector: DoRA, IA3."""
    multiplied: bool = True
    """The adapter multiplies the inputs of its layers: all but IA3."""
    dropped: int = 0
    """Numbers of a token that the adapter drops some of, in one layer."""
    head: bool = False
    """The output head trains."""
    repeated: bool = False
    """Attention repeats keys and values for each head."""
    rounding: bool = False
    """Quantization-aware training replaces the forwards of linear layers."""
    rounded_gib: float = 0.0
    """GiB that quantization-aware training keeps until backward."""
    fused_mlps: bool = False
    """The MLP of every layer runs fused as a whole where adapters are fused."""
    unfused: str = ""
    """Why some layers or MLPs do not run fused."""
    obstacle: str = ""
    """Why no layer of the adapter can run fused; the empty string if that is not known before."""
    breaks: frozenset[str] = frozenset()
    """Adapters whose forward breaks the graph of torch.compile, as PEFT runs it."""

    @property
    def kind(self) -> str:
        """The row of `cuda_graphs.LAUNCHED`."""
        return ("fp8" if self.codes == "fp8" else "adapter") if self.adapted else "full"


class Decisions(NamedTuple):
    """What was decided for a model, and the figures behind it."""

    fused: Choice
    compile: Choice
    checkpointing: Choice
    offload: Choice
    graphs: Choice
    memory: Memory
    """The memory plan of one forward pass."""
    keeps: Keeps
    """What backward keeps, in the terms of `memory_estimate`."""

    def by_option(self) -> dict[str, Choice]:
        """The choices by the names that run checks and `recipe.resolved.yaml` have for them."""
        return {
            "speed.fused": self.fused,
            "speed.compile": self.compile,
            "speed.activation_checkpointing": self.checkpointing,
            "speed.offload": self.offload,
            "CUDA graphs": self.graphs,
        }


def decide_fused(spec: ModelSpec, asked: str | bool, hardware: Hardware, sharded: str = "") -> Choice:
    """Decide whether adapters run through the fused forwards of `speed.fused_lora`.

    Args:
        sharded: what splits the weights between processes: FSDP, DeepSpeed.

    Raises:
        UserError: asked for where there is no adapter (exit 2), where weights are split, or where no layer
            can be fused (exit 3).
    """
    if not spec.layers:
        return Choice("off", _unknown(spec))
    if sharded and spec.adapted:
        reason = f"{sharded} splits the weights that fast forwards hold whole"
        if asked is True:
            problem = Problem(reason, "speed.fused", found=sharded, fix="speed.fused: auto")
            raise UserError(problem, code=Exit.ENVIRONMENT)
        return Choice("off", reason if asked == "auto" else "asked for")
    chosen = compilation.choose_fused(
        asked, hardware, adapted=spec.adapted, dtype=spec.dtype, rounding=spec.rounding
    )
    if chosen.value == "off" or not spec.obstacle:
        return chosen
    if asked is True:
        raise none_fused(spec.obstacle)
    return Choice("off", f"auto: {spec.obstacle}")


def none_fused(reason: str) -> UserError:
    """The error of `speed.fused: true` on an adapter that can't be fused."""
    what, fix = "none of the adapter's layers can be fused", "speed.fused: auto"
    return UserError(Problem(what, "speed.fused", found=reason, fix=fix), code=Exit.ENVIRONMENT)


def decide(spec: ModelSpec, speed: Speed, work: Work, hardware: Hardware, fused: Choice) -> Decisions:
    """Decide how a model with its adapter runs: compiled or not, and what backward keeps.

    Args:
        spec: the model as it is after `fused` was carried out, or would be.
        fused: what `decide_fused` chose.

    Raises:
        UserError: what was asked for can't be had together, or not here (exit 3).
    """
    if not spec.layers:
        return _with_unknown_layers(spec, speed, work, fused)
    broken = f"PEFT's forward of {', '.join(sorted(spec.breaks))} breaks the graph" if spec.breaks else ""
    _refuse(compilation.against_breaks(speed.compile, broken))
    compile = compilation.choose_compile(speed.compile, work._replace(eager=work.eager or broken), hardware)
    products = cuda_graphs.products(spec.config, work.tokens, hardware.peak_flops, kind=spec.kind)
    graphs = cuda_graphs.choose(
        speed.compile, compile, differs=work.differs, products=products, kind=spec.kind
    )
    keeps = keeps_of(spec, work.parts, fused=fused.value == "on", compiled=compile.value == "on")
    plan = plan_memory(spec, work, keeps, speed.offload)
    plan = plan._replace(unfused=f"speed.fused: {spec.unfused or fused.reason}")
    once = work.once and speed.activation_checkpointing == "auto"
    asked = "none" if once else speed.activation_checkpointing
    checkpointing, offload, graphs, plan = cuda_graphs.beside(graphs, speed, asked, plan, hardware)
    _refuse(compilation.against_graphs(speed.compile, checkpointing.value, offload.value, work.sharded))
    if once:
        why = f"auto: TransformerEngine's fp8 is in force in forward alone: {launch_environment.ONCE}"
        checkpointing = checkpointing._replace(reason=why)
    return Decisions(fused, compile, checkpointing, _with_gain(offload, spec), graphs, plan, keeps)


def plan_memory(spec: ModelSpec, work: Work, keeps: Keeps, offload: str) -> Memory:
    """Plan the memory of one forward and backward pass.

    Args:
        offload: `speed.offload`, or what it became.
    """
    usable = work.usable - work.each * (spec.trained // work.parts) / memory_estimate.GIB
    given = {"usable": usable, "offload": offload, "extra": spec.rounded_gib}
    return memory_estimate.activations(spec.config, work.tokens, keeps, **given)._replace(host=work.host)


def keeps_of(spec: ModelSpec, parts: int, *, fused: bool, compiled: bool) -> Keeps:
    """What backward keeps.

    Args:
        parts: into how many parts the launch splits optimizer state.
    """
    return memory_estimate.Keeps(
        fused=fused and spec.fused_mlps,
        compiled=compiled,
        adapted=spec.adapted,
        columns=spec.columns,
        dropped=spec.dropped,
        repeated=spec.repeated,
        multiplied=spec.multiplied,
        four_bit=spec.codes == "4-bit",
        uncast=spec.adapted and parts > 1,
        fp8=spec.codes == "fp8",
        head=spec.head,
    )


def _refuse(problem: Problem | None) -> None:
    if problem:
        raise UserError(problem, code=Exit.ENVIRONMENT)


def _unknown(spec: ModelSpec) -> str:
    return f"the layers of {spec.config.get_text_config().model_type} are not known"


def _with_unknown_layers(spec: ModelSpec, speed: Speed, work: Work, fused: Choice) -> Decisions:
    """The decisions for a model whose decoder layers are not where transformers' decoders have them.

    Raises:
        UserError: something was asked for that needs them (exit 3).
    """
    reason, off = _unknown(spec), (False, "none", "auto")
    options = ("fused", "compile", "activation_checkpointing", "offload")
    problems = [
        Problem(reason, f"speed.{name}", found=getattr(speed, name), fix=f"speed.{name}: {fix}")
        for name, fix in zip(options, ("auto", "auto", "auto", "none"), strict=True)
        if getattr(speed, name) not in off and getattr(speed, name) != "optimizer"
    ]
    if problems:
        raise UserError(*problems, code=Exit.ENVIRONMENT)
    offload = Choice(speed.offload if speed.offload != "auto" else "none", reason)
    keeps = keeps_of(spec, work.parts, fused=False, compiled=False)
    plan, choice = plan_memory(spec, work, keeps, offload.value), Choice("off", reason)
    return Decisions(fused, choice, Choice("none", reason), _with_gain(offload, spec), choice, plan, keeps)


def _with_gain(offload: Choice, spec: ModelSpec) -> Choice:
    """The choice, with what there is to gain from the optimizer's part."""
    if offload.value not in ("optimizer", "all"):
        return offload
    state = 8 * spec.trained / memory_estimate.GIB
    little = ", which is little: an adapter's" if spec.adapted else ""
    return Choice(offload.value, f"AdamW's state takes {state:.2g} GiB{little}")

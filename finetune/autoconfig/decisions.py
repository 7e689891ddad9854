"""Decide the settings of `speed:` for one model. A run, a plan and a check share this decision.

A run describes its live model in `speed/live_model_spec.py`. A plan describes the model of a config in
`planning/planned_spec.py`. Like all of `autoconfig`, this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from finetune.autoconfig import compilation, cuda_graphs, loss_support, memory_estimate
from finetune.core.errors import Exit, Problem, UserError, raise_if_any
from finetune.core.formatting import as_yaml
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from finetune.autoconfig.compilation import Work
    from finetune.autoconfig.memory_estimate import Keeps, Memory
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Speed

# Families of transformers 5.22 whose class has no `supports_gradient_checkpointing`
WITHOUT_CHECKPOINTING = ("cpmant", "gpt_neox_japanese", "jetmoe")


@dataclass(frozen=True)
class ModelSpec:
    """The properties of a model with its adapter that decide its speed and memory."""

    config: ModelConfig
    """The transformers config."""
    layers: int
    """Number of decoder layers; 0: the model does not have them where transformers' decoders do."""
    adapted: bool
    """An adapter trains, and not every parameter."""
    dtype: str
    """The dtype of weights that are not quantized, such as bfloat16."""
    codes: str = ""
    """Quantization of the linear layers: fp8, 4-bit, or empty for all others."""
    trained: int = 0
    """Trainable parameters over all processes."""
    columns: bool = False
    """The adapter scales each output by a trained vector: DoRA, IA3."""
    multiplied: bool = True
    """The adapter multiplies the inputs of its layers: all but IA3."""
    dropped: int = 0
    """Values per token and layer to which the adapter applies dropout."""
    head: bool = False
    """The output head trains."""
    repeated: bool = False
    """Attention repeats keys and values for each query head."""
    rounding: bool = False
    """Quantization-aware training replaces the forwards of linear layers."""
    rounded_gib: float = 0.0
    """GiB that quantization-aware training keeps until backward."""
    fused_mlps: bool = False
    """The MLP of every layer runs fused as a whole if adapters are fused."""
    experts: str = ""
    """How experts run, as in `memory_estimate.Keeps`."""
    dequantized: bool = False
    """The experts' weights are quantized."""
    unfused: str = ""
    """Why some layers or MLPs do not run fused."""
    unsupported_reason: str = ""
    """Why no layer of the adapter can run fused; the empty string if no reason is known."""
    breaks: frozenset[str] = frozenset()
    """Adapters whose forward in PEFT breaks the graph of torch.compile."""

    @property
    def kind(self) -> str:
        """The key in `cuda_graphs.LAUNCHED`."""
        if self.experts == "fused":
            return "quantized experts" if self.dequantized else "experts"
        return ("fp8" if self.codes == "fp8" else "adapter") if self.adapted else "full"


class Decisions(NamedTuple):
    """The decisions for a model, and the estimates behind them."""

    fused: Choice
    compile: Choice
    checkpointing: Choice
    offload: Choice
    graphs: Choice
    memory: Memory
    """The memory plan of one forward pass."""
    keeps: Keeps
    """The activations that backward keeps, as `memory_estimate` describes them."""

    def by_option(self) -> dict[str, Choice]:
        """Return the choices under their names in run checks and in `recipe.resolved.yaml`."""
        return {
            "speed.fused": self.fused,
            "speed.compile": self.compile,
            "speed.activation_checkpointing": self.checkpointing,
            "speed.offload": self.offload,
            "CUDA graphs": self.graphs,
        }


def decide_fused(spec: ModelSpec, requested: str | bool, hardware: Hardware, sharded: str = "") -> Choice:
    """Decide whether adapters run through the fused forwards of `speed.fused_lora`.

    Args:
        sharded: the library that shards the weights, FSDP or DeepSpeed; the empty string if none does.

    Raises:
        UserError: fused adapters are asked for without an adapter (exit 2). They are asked for with sharded
            weights, or no layer can be fused (exit 3).
    """
    if not spec.layers:
        return Choice("off", _unknown(spec))
    if sharded and spec.adapted:
        reason = f"{sharded} shards the weights, and fused layers need whole weights"
        if requested is True:
            raise UserError(
                Problem(
                    reason,
                    "speed.fused",
                    found=f"true, with {sharded}",
                    fix="speed.fused: auto",
                    code="speed-option",
                ),
                code=Exit.ENVIRONMENT,
            )
        return Choice("off", reason if requested == "auto" else "asked for")
    chosen = compilation.choose_fused(
        requested, hardware, adapted=spec.adapted, dtype=spec.dtype, rounding=spec.rounding
    )
    if chosen.value == "off" or not spec.unsupported_reason:
        return chosen
    if requested is True:
        raise none_fused(spec.unsupported_reason)
    return Choice("off", f"auto: {spec.unsupported_reason}")


def none_fused(reason: str) -> UserError:
    """Return the error of `speed.fused: true` on an adapter that can't be fused."""
    return UserError(
        Problem(
            "none of the adapter's layers can be fused",
            "speed.fused",
            found="true",
            why=reason,
            fix="speed.fused: auto",
            code="speed-option",
        ),
        code=Exit.ENVIRONMENT,
    )


def decide(spec: ModelSpec, speed: Speed, work: Work, hardware: Hardware, fused: Choice) -> Decisions:
    """Decide how a model with its adapter runs: compilation, CUDA graphs, checkpointing and offloading.

    Args:
        spec: the model after `fused` is applied.
        fused: the choice of `decide_fused`.

    Raises:
        UserError: requested settings do not work together or on this machine (exit 3).
    """
    if not spec.layers:
        return _with_unknown_layers(spec, speed, work, fused)
    names = ", ".join(sorted(spec.breaks))
    broken = f"PEFT's forward pass of {names} breaks the graph of torch.compile" if names else ""
    raise_if_any([compilation.check_graph_breaks(speed.compile, broken)], code=Exit.ENVIRONMENT)
    compile = compilation.choose_compile(speed.compile, work._replace(eager=work.eager or broken), hardware)
    gemms = cuda_graphs.layer_gemm_seconds(spec.config, work.tokens, hardware.peak_flops, kind=spec.kind)
    graphs = cuda_graphs.choose(
        speed.compile, compile, unsupported=work.graphs_unsupported, gemm_seconds=gemms, kind=spec.kind
    )
    on = {"fused": fused.value == "on", "compiled": compile.value == "on"}
    keeps = keeps_of(spec, work.parts, speed.loss, **on)
    plan = plan_memory(spec, work, keeps, speed.offload)
    plan = plan._replace(unfused=f"speed.fused: {spec.unfused or fused.reason}")
    once = work.no_recompute and speed.activation_checkpointing == "auto"
    requested = "none" if once else speed.activation_checkpointing
    checkpointing, offload, graphs, plan = cuda_graphs.choose_with_memory(
        graphs, speed, requested, plan, hardware
    )
    checkpointing = _supported_checkpointing(checkpointing, spec)
    conflict = compilation.check_cuda_graphs(speed.compile, checkpointing.value, offload.value, work.sharded)
    raise_if_any([conflict], code=Exit.ENVIRONMENT)
    if once:
        checkpointing = checkpointing._replace(
            reason=(
                "auto: TransformerEngine's fp8 applies only in the forward pass, and "
                f"{launch_environment.ONCE}"
            )
        )
    return Decisions(fused, compile, checkpointing, _with_gain(offload, spec), graphs, plan, keeps)


def _supported_checkpointing(chosen: Choice, spec: ModelSpec) -> Choice:
    """Return the choice, or only norms if transformers can't recompute the layers of a family.

    Raises:
        UserError: the recipe requests recomputed layers (exit 3).
    """
    family = spec.config.get_text_config().model_type
    if family not in WITHOUT_CHECKPOINTING or not chosen.value.startswith("full"):
        return chosen
    reason = f"transformers has no activation checkpointing for {family}"
    if chosen.reason != "asked for":
        return Choice("norms", f"auto: {reason}")
    problem = Problem(
        reason,
        "speed.activation_checkpointing",
        found=chosen.value,
        fix="set `speed.activation_checkpointing: auto`, norms or none",
        code="speed-option",
    )
    raise UserError(problem, code=Exit.ENVIRONMENT)


def plan_memory(spec: ModelSpec, work: Work, keeps: Keeps, offload: str) -> Memory:
    """Plan the memory of one forward and backward pass.

    Args:
        offload: `speed.offload`, or the choice for it.
    """
    usable = work.usable - work.bytes_per_parameter * (spec.trained // work.parts) / memory_estimate.GIB
    return memory_estimate.activations(
        spec.config, work.tokens, keeps, usable=usable, offload=offload, extra=spec.rounded_gib
    )._replace(host=work.host)


def keeps_of(spec: ModelSpec, parts: int, loss: str, *, fused: bool, compiled: bool) -> Keeps:
    """Describe the activations that backward keeps.

    Args:
        parts: the number of shards of the optimizer state.
        loss: `speed.loss`, or the choice for it.
    """
    chosen = spec.codes == "fp8" and loss_support.auto_uses_fp8(spec.config, head_trains=spec.head)
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
        loss_fp8=loss == "chunked_fp8" or (loss == "auto" and chosen),
        head=spec.head,
        experts=spec.experts,
        dequantized=spec.dequantized,
    )


def _unknown(spec: ModelSpec) -> str:
    return f"finetune does not know the decoder layers of {spec.config.get_text_config().model_type}"


def _with_unknown_layers(spec: ModelSpec, speed: Speed, work: Work, fused: Choice) -> Decisions:
    """Decide for a model whose decoder layers are not where transformers' decoders have them.

    Raises:
        UserError: a requested setting needs the decoder layers (exit 3).
    """
    reason, off = _unknown(spec), (False, "none", "auto")
    options = ("fused", "compile", "activation_checkpointing", "offload")
    raise_if_any(
        (
            Problem(
                reason,
                f"speed.{name}",
                found=as_yaml(getattr(speed, name)),
                fix=f"speed.{name}: {fix}",
                code="speed-option",
            )
            for name, fix in zip(options, ("auto", "auto", "auto", "none"), strict=True)
            if getattr(speed, name) not in off and getattr(speed, name) != "optimizer"
        ),
        code=Exit.ENVIRONMENT,
    )
    offload = Choice(speed.offload if speed.offload != "auto" else "none", reason)
    keeps = keeps_of(spec, work.parts, speed.loss, fused=False, compiled=False)
    plan, choice = plan_memory(spec, work, keeps, offload.value), Choice("off", reason)
    return Decisions(fused, choice, Choice("none", reason), _with_gain(offload, spec), choice, plan, keeps)


def _with_gain(offload: Choice, spec: ModelSpec) -> Choice:
    """Return the choice. If it offloads the optimizer, its reason states the memory that this saves."""
    if offload.value not in ("optimizer", "all"):
        return offload
    state = 8 * spec.trained / memory_estimate.GIB
    little = ", which is little because only the adapter trains" if spec.adapted else ""
    return Choice(offload.value, f"AdamW's state needs {state:.2g} GiB{little}")

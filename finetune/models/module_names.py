"""Names, kinds and shapes of a model's modules and parameters. No torch is imported until a model is read."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

LINEAR = ("Linear", "Conv1D")  # what "all-linear" means; GPT-2's Conv1D is a linear layer, stored transposed
# The kinds of modules that some adapter changes; any other module's kind is the name of its class
NO_WEIGHT = "no weight"
KINDS = (*LINEAR, "Embedding", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention")
# The end of a quantized expert parameter's name, with the name by which the model reads it
_STORED = re.compile(r"\.parametrizations\.(\w+)\.original$")


@dataclass(frozen=True)
class Names:
    """Names of modules that a recipe may use, without PEFT's prefixes. Text runs through these modules.

    `module_lists.read` makes it from a config, `of_model` from a model in memory. Both are equal.
    """

    kinds: dict[str, str]
    """The kind of each module by its full name, in the model's order."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of each parameter by its full name; a tied head is not among them. A parameter that several
    layers share has its first name."""
    family: str = ""
    embedding: str = ""
    """The module that `get_input_embeddings()` returns."""
    head: str = ""
    """The module that `get_output_embeddings()` returns; empty without a head."""
    tied: bool = False
    """Whether the head shares the embeddings' weight."""
    without_gradient: tuple[str, ...] = ()
    """Modules that get no gradient, because the model does not call them or uses their output for a choice.
    Known only if the names come from a config."""
    untrained: tuple[str, ...] = ()
    """Parameters that get no gradient, so `full` does not change them. Known only if the names come from a
    config."""
    uncalled: tuple[str, ...] = ()
    """The modules of `without_gradient` that the model does not call, although it may read their weights."""
    shared: dict[str, str] = field(default_factory=dict)
    """The other names of parameters that several layers share, such as Zamba2's attention: name -> name in
    `shapes`. A tied head is not among them."""
    tower_kinds: dict[str, str] = field(default_factory=dict)
    """The same as `kinds`, for the encoders of a multimodal model."""
    tower_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def linear(self) -> list[str]:
        """Return the linear layers without the head, which "all-linear" means."""
        return [name for name, kind in self.kinds.items() if kind in LINEAR and name != self.head]

    @cached_property
    def modules(self) -> list[str]:
        """Return the modules with a weight: linear layers, embeddings, norms and the head."""
        weights = {*self.shapes, *self.shared}
        return [name for name in self.kinds if f"{name}.weight" in weights or name == self.head]

    @property
    def parameters(self) -> list[str]:
        return list(self.shapes)

    @cached_property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each linear layer without the head."""
        return _linear_shapes(self.kinds, self.every_shape, self.head)

    @cached_property
    def every_shape(self) -> dict[str, tuple[int, ...]]:
        """Return `shapes` with the other names of shared parameters."""
        return {**self.shapes, **{name: self.shapes[first] for name, first in self.shared.items()}}

    @cached_property
    def stacked_experts(self) -> list[tuple[str, str]]:
        """Return the module and the name of each parameter that stacks the weights of experts."""
        parts = (name.rpartition(".")[::2] for name, shape in self.shapes.items() if len(shape) == 3)
        return [
            (holder, parameter)
            for holder, parameter in parts
            if "experts" in holder or "Experts" in self.kinds.get(holder, "")
        ]

    @cached_property
    def routers(self) -> list[str]:
        """Return the routers that choose experts for tokens, of which transformers returns the logits."""
        return [name for name, kind in self.kinds.items() if kind.endswith(("Router", "TopKGating"))]

    @cached_property
    def tower_linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the same for the linear layers of a multimodal model's encoders."""
        return _linear_shapes(self.tower_kinds, self.tower_shapes, "")

    def with_rows(self, rows: int) -> Names:
        """Return the names with the shapes after embeddings and head are resized to this number of tokens."""
        ends = {f"{name}.weight" for name in (self.embedding, self.head)}
        grown = {
            name: (max(shape[0], rows), *shape[1:]) if name in ends else shape
            for name, shape in self.shapes.items()
        }
        return replace(self, shapes=grown)

    @cached_property
    def has_decoder_layers(self) -> bool:
        """Return whether `decoder_of(model).layers` is the list of the decoder layers."""
        lists = {found[1] for name in self.kinds if (found := re.match(r"((?:.*?\.)?layers)\.\d+", name))}
        return len([name for name in lists if "encoder" not in name]) == 1

    @cached_property
    def layers(self) -> int:
        """Return the number of layers: one more than the highest number in a name."""
        numbers = {int(found[1]) for name in self.modules if (found := re.search(r"\.(\d+)\.", name))}
        return max(numbers, default=-1) + 1


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the module that calls the decoder layers of a transformers model.

    In some families, `get_decoder()` returns the whole model or the head (transformers 5.22: Llama 4, Mllama,
    ModernBERT decoder). For these, return the base model.
    """
    decoder = model.get_decoder()
    if hasattr(decoder, "layers"):
        return decoder
    below = model.base_model if model.base_model is not model else getattr(model, "model", decoder)
    return below if hasattr(below, "layers") else decoder


def _linear_shapes(
    kinds: dict[str, str], shapes: dict[str, tuple[int, ...]], head: str
) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name, kind in kinds.items():
        if kind in LINEAR and name != head and len(size := shapes.get(f"{name}.weight", ())) == 2:
            found[name] = (size[1], size[0]) if kind == "Conv1D" else (size[0], size[1])
    return found


def of_model(model: PreTrainedModel) -> Names:
    """Return the names of a model in memory or on the meta device, before it gets an adapter."""
    text = {id(module) for module in of_text(model)}
    named = [(name, module) for name, module in model.named_modules() if name]
    named = [(name, module) for name, module in named if ".parametrizations" not in name]
    kinds = {name: kind_of(module) for name, module in named if id(module) in text}
    towers = {name: kind_of(module) for name, module in named if id(module) not in text}
    of_text_model = {id(p) for module in of_text(model) for p in module.parameters(recurse=False)}
    shapes = {
        _STORED.sub(r".\1", name): (id(p), _shape(model, name, p)) for name, p in model.named_parameters()
    }
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head_name = _name_of(named, head)
    return Names(
        kinds=kinds,
        shapes={name: shape for name, (at, shape) in shapes.items() if at in of_text_model},
        family=model.config.model_type,
        embedding=_name_of(named, embedding),
        head=head_name,
        tied=head is not None and head.weight is embedding.weight,
        shared=_shared(
            model, {at: name for name, (at, _) in shapes.items() if at in of_text_model}, head_name
        ),
        tower_kinds=towers,
        tower_shapes={name: shape for name, (at, shape) in shapes.items() if at not in of_text_model},
    )


def _shared(model: nn.Module, first: dict[int, str], head: str) -> dict[str, str]:
    """Return the further names of parameters: name -> the first name.

    Args:
        first: the first name of each parameter, by its id.
    """
    return {
        name: first[id(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
        if first.get(id(p), name) != name and name.rpartition(".")[0] != head and not _STORED.search(name)
    }


def _shape(model: nn.Module, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter as the model reads it, which differs if it is quantized."""
    if not (found := _STORED.search(name)):
        owner, _, leaf = name.rpartition(".")
        layer: Any = model.get_submodule(owner) if leaf == "weight" else None
        if layer is not None and hasattr(layer, "in_features") and stored_as(layer):
            return layer.out_features, layer.in_features
        return tuple(parameter.shape)
    by: Any = model.get_submodule(f"{name[: found.start()]}.parametrizations.{found[1]}.0")
    return tuple(by.shape)


def _name_of(named: list[tuple[str, Any]], module: nn.Module | None) -> str:
    return next((name for name, one in named if one is module), "")


def kind_of(module: nn.Module) -> str:
    """Return a module's class as PEFT sees it: an entry of `KINDS`, or the name of its own class.

    Some modules are none of `KINDS`, because an adapter's forward would compute nonsense there, or fail:

    - an embedding that is called with something else than token ids
    - a router that returns more than one tensor
    - a linear layer or a convolution in groups
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    name = type(module).__name__
    if hasattr(module, "parametrizations"):  # quantized experts: torch has given them a class of their own
        name = type(module).__mro__[1].__name__
    if next(module.parameters(), None) is None:
        return NO_WEIGHT
    if isinstance(module, nn.Embedding):
        first = list(inspect.signature(type(module).forward).parameters)[1]
        return "Embedding" if first.startswith("input") else name
    if isinstance(module, nn.Linear):
        grouped = getattr(module, "n_groups", 1) > 1  # DeepSeek-V4's output projection
        return f"grouped {name}" if grouped else name if "Router" in name else "Linear"
    if getattr(module, "groups", 1) > 1:  # an adapter's rank would have to be a multiple of their number
        return f"grouped {name}"
    for kind in (Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention):
        if isinstance(module, kind):
            return kind.__name__
    return name


def of_experts(model: nn.Module) -> int:
    """Return the bytes of experts' weights that are stacked in one parameter and not quantized."""
    named = [(name, p) for name, p in model.named_parameters() if not _STORED.search(name)]
    return sum(p.nbytes for name, p in named if p.dim() == 3 and ".experts." in name)


def stored_as(layer: nn.Module) -> str:
    """Return the value of `model.quantization` of a module; the empty string if it is not quantized."""
    weight: Any = getattr(layer, "weight", None)
    if type(weight).__module__.startswith("torchao."):
        return "torchao_int8"
    if type(layer).__name__ == "Linear8bitLt":
        return str(weight.dtype).removeprefix("torch.")
    if type(layer).__name__ == "Fp8Linear":
        return "fp8"
    return getattr(getattr(weight, "quant_state", None), "quant_type", "")


def of_text(model: PreTrainedModel) -> list[Any]:
    """Return the modules of a transformers model, without the encoders of a multimodal model."""
    if model.config.get_text_config() is model.config:
        return list(model.modules())
    head = model.get_output_embeddings()
    return [*model.get_decoder().modules(), *(head.modules() if head is not None else ())]


def short(name: str) -> str:
    """Return the last part of a name: `q_proj` for `model.layers.0.self_attn.q_proj`."""
    return name.rpartition(".")[2]

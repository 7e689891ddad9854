"""Names of a model's modules and parameters, and which of them a recipe's names match; what they weigh."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.adapter_types import REBASING_INITS
from finetune.errors import Exit, Problem, UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from finetune.receipts import Ledger

TEXT_MODEL = "language_model"  # what transformers calls the decoder of a multimodal model
_NOT_LINEAR = ("embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out")


class Names(NamedTuple):
    """The names a recipe may use for parts of a model, each in full, without PEFT's prefixes."""

    linear: list[str]
    """Linear layers, without the head: what "all-linear" means."""
    modules: list[str]
    """Modules that hold a weight: linear layers, embeddings, norms, the head."""
    parameters: list[str]

    @property
    def layers(self) -> int:
        numbers = {int(found[1]) for name in self.modules if (found := re.search(r"\.(\d+)\.", name))}
        return max(numbers, default=-1) + 1


def of_experts(model: Any) -> int:
    """Bytes of the experts' weights that stand in one parameter for all: no linear layers."""
    named = model.named_parameters()
    return sum(p.nbytes for name, p in named if p.dim() == 3 and ".experts." in name)


def size(count: float) -> str:
    """A number of bytes, to be read."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def add_coded_receipt(model: Any, storage: str, ledger: Ledger) -> None:
    """Linear layers of a base that bitsandbytes or torchao quantised, and what it weighs, counted on the live
    model, before an adapter is on it."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if hasattr(m, "in_features") and m is not head]
    coded = sum(stored_as(layer) == storage for layer in linear)
    stacked = of_experts(model)
    got = f"{coded} of {len(linear)} linear layers, {size(model.get_memory_footprint())} in all"
    got += f"; {len(linear) - coded} stay as numbers" if coded < len(linear) else ""
    got += f"; {size(stacked)} of experts stay: they are no linear layers" if stacked else ""
    how = "what the layers of the live model hold"
    ledger.add("speed.base", storage, got, how, ok=bool(coded), code=Exit.ENVIRONMENT)


def stored_as(layer: Any) -> str:
    """What a module's weight is stored as, by the values of speed.base; empty: as numbers, or it has none."""
    weight: Any = getattr(layer, "weight", None)
    if type(weight).__module__.startswith("torchao."):
        return "torchao_int8"
    if type(layer).__name__ == "Linear8bitLt":
        return str(weight.dtype).removeprefix("torch.")
    if type(layer).__name__ == "Fp8Linear":
        return "fp8"
    return getattr(getattr(weight, "quant_state", None), "quant_type", "")


def tensors(folder: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a folder's safetensors files, by name.

    Reads only the headers: milliseconds for any size, no torch.

    Raises:
        UserError: a file that is not safetensors, or not all of one (exit 2).
    """
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found |= _header(path)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            fix = "download it again; a Git LFS pointer is a few lines of text in its place"
            problem = Problem("not a safetensors file", "model.name", str(path), str(error), fix=fix)
            raise UserError(problem) from error
    return found


def _header(path: Path) -> dict[str, list[int]]:
    """The shapes that one file's header gives (the format: https://huggingface.co/docs/safetensors).

    `safe_open` of safetensors imports numpy before it opens a file, a fifth of what `finetune check` takes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"its header would be {length:,} bytes, the file is {size:,}")
        header = json.loads(file.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    ends = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if ends != size:
        raise ValueError(f"its tensors end at byte {ends:,}, the file is {size:,}")
    return {name: entry["shape"] for name, entry in entries.items()}


def in_folder(folder: Path) -> Names:
    """Names of a local model, from the headers of its files."""
    return of_tensors(of_text_model(tensors(folder)))


def of_tensors(tensors: Mapping[str, Sequence[int]]) -> Names:
    """Names of a model with tensors of these shapes."""
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    linear = [name for name in modules if len(tensors[f"{name}.weight"]) == 2]
    tied = ["lm_head"] if tensors and "lm_head" not in modules else []  # not written a second time
    return Names([name for name in linear if short(name) not in _NOT_LINEAR], modules + tied, list(tensors))


def of_text_model(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """All tensors but those of a multimodal model's towers, which no text runs through."""
    text = {name for name in tensors if {TEXT_MODEL, "lm_head"} & set(name.split("."))}
    towers = any(TEXT_MODEL in name.split(".") for name in text)
    return {name: shape for name, shape in tensors.items() if name in text} if towers else tensors


def of_text(model: Any) -> list[Any]:
    """The modules of a transformers model that text runs through: all, but for a multimodal one's towers."""
    if model.config.get_text_config() is model.config:
        return list(model.modules())
    head = model.get_output_embeddings()
    return [*model.get_decoder().modules(), *(head.modules() if head is not None else ())]


def short(name: str) -> str:
    """`model.layers.0.self_attn.q_proj` -> `q_proj`."""
    return name.rpartition(".")[2]


def match(targets: str | Iterable[str], names: Collection[str]) -> dict[str, int]:
    """How many of `names` each target matches, by PEFT's rules: a suffix, or one string as a whole regex."""
    if targets == "all-linear":
        return {"all-linear": len(names)}
    if isinstance(targets, str):
        try:
            return {targets: sum(bool(re.fullmatch(targets, name)) for name in names)}
        except re.error as error:
            problem = Problem(f"not a regular expression: {error}", "adapter.target_modules", found=targets)
            raise UserError(problem) from None
    return {t: sum(name == t or name.endswith(f".{t}") for name in names) for t in targets}


def unmatched(
    targets: str | Iterable[str], names: Collection[str], key: str = "target_modules"
) -> list[Problem]:
    """A problem for each target that matches nothing, with the nearest name and the names there are."""
    available = list(dict.fromkeys(short(name) for name in names))
    problems = []
    for index, (target, count) in enumerate(match(targets, names).items()):
        if not count:
            place = f"adapter.{key}" if isinstance(targets, str) else f"adapter.{key}.{index}"
            what = f'"{target}" matches no module of this model'
            fix = nearest(target, available)
            if isinstance(targets, str) and target in available:
                fix = f"[{target}]: a text is a regular expression for whole names"
            problems.append(Problem(what, place, found=", ".join(available), fix=fix))
    return problems


def problems(options: Mapping[str, Any], names: Names, *, any_module: bool = False) -> list[Problem]:
    """Every name and number among PEFT's options that nothing in the model answers to.

    Args:
        any_module: the type changes norms or embeddings too, not linear layers only.
    """
    found: list[Problem] = []
    targets = options.get("target_modules")
    embeddings = [name for name in names.modules if short(name) in ("embed_tokens", "wte")]
    layers = names.modules if any_module else [*names.linear, *embeddings]
    if targets is not None:
        found += unmatched(targets, names.linear if targets == "all-linear" else layers)
    if isinstance(targets, list) and "lm_head" in targets:
        what, fix = (
            "TRL's loss reads the head's own weight and would pass it by",
            "modules_to_save: [lm_head]",
        )
        found = [p for p in found if '"lm_head"' not in p.what]
        found.append(Problem(what, "adapter.target_modules", found="lm_head", fix=fix))
    adapted = targeted(options, names) if targets else []
    init, rows = str(options.get("init_lora_weights")), [name for name in embeddings if name in adapted]
    if init.startswith(REBASING_INITS) and rows:
        what = f"{init} is saved as a difference of LoRAs, which has no place for those of embeddings"
        fix = "linear layers alone, or init_lora_weights: true"
        found.append(Problem(what, "adapter.target_modules", found=", ".join(rows), fix=fix))
    for key in ("exclude_modules", "feedforward_modules"):
        found += unmatched(options.get(key) or (), layers, key)
    adapted = adapted if adapted and not options.get("target_parameters") else layers
    for key in ("rank_pattern", "alpha_pattern"):
        found += _patterns(options.get(key) or {}, adapted, key)
    for index, target in enumerate(options.get("modules_to_save") or ()):
        if not any(name.endswith(target) for name in names.modules):  # PEFT's rule: "norm" is every norm
            lost = unmatched([target], names.modules, "modules_to_save")
            found += [replace(problem, key=f"adapter.modules_to_save.{index}") for problem in lost]
    found += _parameters(options.get("target_parameters") or (), names)
    wanted = options.get("layers_to_transform")
    missing = [
        n for n in ([wanted] if isinstance(wanted, int) else wanted or ()) if not 0 <= n < names.layers
    ]
    if missing:
        expected = f"0 to {names.layers - 1}"
        texts = {"found": ", ".join(map(str, missing)), "expected": expected}
        found.append(Problem("the model has no such layer", "adapter.layers_to_transform", **texts))
    return found


def targeted(options: Mapping[str, Any], names: Names) -> list[str]:
    """The layers that PEFT's rules pick: targets, less exclusions, in the layers named."""
    targets, excluded = options["target_modules"], options.get("exclude_modules") or []
    layers, saved = options.get("layers_to_transform"), options.get("modules_to_save") or []
    wanted = None if layers is None else {layers} if isinstance(layers, int) else set(layers)
    candidates = names.linear if targets == "all-linear" else names.modules

    def picked(name: str) -> bool:
        if not any(match(targets, [name]).values()):
            return False
        if any(match(excluded, [name]).values()) or any(match(saved, [name]).values()):
            return False
        number = re.search(r"\.(\d+)\.", name)
        return wanted is None or (number is not None and int(number[1]) in wanted)

    return [name for name in candidates if picked(name)]


def uneven(targets: str | Iterable[str] | None, names: Names) -> str:
    """One line if the targets are not in every layer alike, else the empty string."""
    if targets is None:
        return ""
    picked = [n for n in names.linear if targets == "all-linear" or any(match(targets, [n]).values())]
    layers = Counter(short(name) for name in picked if re.search(r"\.\d+\.", name))
    partly = [
        f"{name} in {count} of {names.layers}" for name, count in layers.items() if count < names.layers
    ]
    return f"layers differ: {', '.join(partly)}" if partly else ""


def _patterns(pattern: Mapping[str, Any], names: Collection[str], key: str) -> list[Problem]:
    """Keys that match nothing, and keys that match the same module and give it other values.

    PEFT takes the first key that matches, and saves keys in the order of the alphabet: where another one
    would be the first then, the adapter can't be opened again.
    """
    available = list(dict.fromkeys(map(short, names)))
    problems, hits = list[Problem](), {name: [one for one in pattern if _ends(name, one)] for name in names}
    used = {one for matching in hits.values() for one in matching}
    for lost in (one for one in pattern if one not in used):
        what = f'"{lost}" matches no module that gets an adapter'
        texts = {"found": ", ".join(available), "fix": nearest(lost, available)}
        problems.append(Problem(what, f"adapter.{key}.{lost}", **texts))
    twice = {(them[0], min(them)): name for name, them in hits.items() if them}
    for (first, saved), name in twice.items():
        if pattern[first] == pattern[saved]:
            continue
        depth = len(saved) - len(saved.lstrip("(")) + 1  # "(" stands before what names have
        early = "(" * depth + first + ")" * depth
        what = f'"{first}" and "{saved}" match the same module, and PEFT saves them in another order'
        texts = {"found": name, "fix": f'"{early}" in place of "{first}", which stays the first'}
        problems.append(Problem(what, f"adapter.{key}", **texts))
    return problems


def _ends(name: str, pattern: str) -> bool:
    """Whether a regular expression is the end of a name (PEFT's `get_pattern_key`)."""
    try:
        return bool(re.match(rf"(.*\.)?({pattern})$", name))
    except re.error:
        return False


def _parameters(targets: Iterable[str], names: Names) -> list[Problem]:
    available = list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names.parameters))
    return [
        Problem(
            f'"{target}" matches no parameter of this model',
            f"adapter.target_parameters.{index}",
            found=", ".join(available),
            fix=nearest(target, available),
        )
        for index, target in enumerate(targets)
        if not any(name == target or name.endswith(f".{target}") for name in names.parameters)
    ]

"""Put an adapter on a model, or go on from one; then say which modules it changed and which weights train.

The types and their keys are in `adapter_types.py`, first weights that need preparation in `adapter_init.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import adapter_init, adapter_types, modules, qat
from finetune.adapter_types import Shapes
from finetune.errors import Exit, Problem, UserError
from finetune.recipe import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from finetune.receipts import Ledger
    from finetune.sections import Adapter


def attach(
    model: PreTrainedModel,
    adapter: Adapter,
    steps: int,
    ledger: Ledger,
    batches: Callable[[], list[dict[str, torch.Tensor]]] = list,
    added: Sequence[int] = (),
) -> PeftModel | PreTrainedModel:
    """Put the adapter on the model. `full` trains the model as it is.

    Args:
        steps: optimizer steps of the whole run; AdaLoRA's schedule is made from it.
        batches: gives batches of training data, for initialisations that look at it.
        added: ids of tokens that are new to the model; their rows train.

    Raises:
        UserError: a name that matches no module, with the nearest; what PEFT refuses (exit 2).
    """
    if adapter.type == "full":
        ledger.add("adapter.type", "full", "full", "no adapter: every parameter trains")
        _count_trainable(model, ledger)
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer

    everything = names(model)
    every = adapter.ours("orth_reg_every") or 1
    if every > steps:
        what = "the orthogonality term would never be computed"
        raise UserError(Problem(what, "adapter.orth_reg_every", found=str(every), expected=f"<= {steps}"))
    try:
        if adapter.source:
            adapted: Any = _go_on(model, adapter, ledger)
        else:
            _check_names(model, adapter)
            config = peft_config(adapter, steps, shapes(model))
            _train_rows(model, config, adapter, added)
            init = adapter.options().get("init_lora_weights")
            adapted = adapter_init.attach(model, config, init, everything.linear, batches, ledger)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(Problem("PEFT refuses it", "adapter", found=" ".join(str(error).split()))) from error
    config: Any = adapted.peft_config["default"]  # the base that it now stands on, by name and commit
    config.base_model_name_or_path = str(model.name_or_path)
    config.revision = getattr(model.config, "_commit_hash", None)
    for name, parameter in adapted.named_parameters():
        if ".ranknum." in name:  # PEFT does not save it, and on a bf16 base leaves it trainable
            parameter.requires_grad = False
    head = adapted.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        what, fix = "TRL's loss reads the head's own weight and passes the adapter by", "adapter.type: lora"
        fix += " with trainable_token_indices" if adapter.type == "trainable_tokens" else ""
        raise UserError(Problem(what, "adapter", found=f"{adapter.type} on the output head", fix=fix))
    if not hasattr(head, "bias"):  # TRL reads it, and PEFT's wrapper of trained tokens has none to give
        head.register_parameter("bias", None)
    _add_receipts(adapted, adapter, everything, ledger)
    if added:
        rows = [f"{len(p)} rows" for n, p in trainable(adapted).items() if "trainable_tokens_delta" in n]
        rows += [
            modules.short(n.partition(".modules_to_save")[0]) for n in trainable(adapted) if "_to_save" in n
        ]
        asked, how = f"{len(added)} rows train", "parameters with requires_grad"
        ledger.add("model.add_tokens", asked, f"{', '.join(rows)} train", how, ok=bool(rows))
    return qat.follow(adapted)


def peft_config(adapter: Adapter, steps: int, model: Shapes) -> PeftConfig:
    """PEFT's config of the recipe's section, completed for this model and this run.

    Raises:
        UserError: options that leave the type nothing to do (exit 2).
    """
    import peft
    from peft import TaskType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.tuners.lora.config import CordaConfig

    kind = adapter_types.find(adapter.type)
    options: dict[str, Any] = {**adapter.options(), **kind.sets}
    if kind.build:
        options = kind.build(options, steps, model)
    for key, value in options.items():
        nested = adapter_types.nested(kind, key)
        if nested and isinstance(value, dict):
            options[key] = getattr(peft, nested)(**value) if hasattr(peft, nested) else value
    init = options.get("init_lora_weights")
    if init in (own := {"eva": peft.EvaConfig, "corda": CordaConfig, "lora_ga": peft.LoraGAConfig}):
        options.setdefault(f"{init}_config", own[init]())
    if init == "loftq":  # PEFT's own would quantise the weights once more
        options["init_lora_weights"] = True
    classes = {str(name.value).lower(): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return classes[kind.peft](task_type=TaskType.CAUSAL_LM, **options)


def derived(model: Any, adapter: Adapter) -> dict[str, Any]:
    """PEFT keys that a builder set, not the recipe: AdaLoRA's schedule, IA3's feed-forward modules."""
    builds = () if adapter.source else adapter_types.find(adapter.type).builds
    values = {
        key: getattr(model.peft_config["default"], key) for key in builds if key not in adapter.options()
    }
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def shapes(model: PreTrainedModel) -> Shapes:
    """What adapter types need to know of a model; the shapes of quantised layers are those of their maths."""
    linear: dict[str, Any] = linear_layers(model)
    sizes = {name: (module.out_features, module.in_features) for name, module in linear.items()}
    return Shapes(sizes)


def check_source(adapter: Adapter, base: str, revision: str | None) -> list[str]:
    """Whether training can go on from `adapter.from`; reads its config only, no torch.

    Returns:
        Notes: what can be seen only when it loads.

    Raises:
        UserError: no adapter there, one of another type, of other options or of another base (exit 2).
    """
    if adapter.source is None:
        return []
    folder = _source_folder(adapter.source)
    if folder is None:
        return [f"adapter.from: {adapter.source} is on the Hub; it is checked when it loads"]
    saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    problems = _source_problems(saved, adapter, base, revision)
    if problems:
        raise UserError(*problems)
    return []


def linear_layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The linear layers by their full names, without the output head."""
    from torch import nn

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def names(model: PreTrainedModel) -> modules.Names:
    """What a recipe may call by name in a live model."""
    holders = [
        name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith(".weight")
    ]
    holders += [] if "lm_head" in holders else ["lm_head"]
    return modules.Names(list(linear_layers(model)), holders, [name for name, _ in model.named_parameters()])


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that the optimizer will move, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that must be the same after training: frozen parameters and buffers.

    AdaLoRA's `ranknum` is bookkeeping of the adapter, not of the base.
    """
    tensors: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    tensors.update(model.named_buffers())
    for name, tensor in list[tuple[str, Any]](tensors.items()):
        if hasattr(tensor, "__tensor_flatten__"):  # torchao keeps codes and scales in one tensor
            del tensors[name]
            inner, _ = tensor.__tensor_flatten__()
            tensors.update({f"{name}.{part}": getattr(tensor, part) for part in inner})
    return {name: tensor for name, tensor in tensors.items() if "ranknum" not in name}


def _source_folder(source: str) -> Path | None:
    """The local folder of `adapter.from`: a PEFT folder, or the adapter of a run; `None`: it is on the Hub.

    Raises:
        UserError: a folder without an adapter (exit 2).
    """
    path = Path(source)
    if not path.exists():
        if local_path(source):
            raise UserError(Problem(f"local path not found: {source}", "adapter.from"))
        return None
    for folder in (path, path / "adapter"):
        if (folder / "adapter_config.json").exists():
            return folder
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) if path.is_dir() else "a file"
    raise UserError(Problem(f"no adapter in {path}", "adapter.from", found=found, fix="a run folder"))


def _source_problems(
    saved: dict[str, Any], adapter: Adapter, base: str, revision: str | None
) -> list[Problem]:
    """What keeps a saved adapter's config from being gone on with under this recipe."""
    kind, found = adapter_types.find(adapter.type), []
    if kind.prompt or kind.peft == "adalora":
        what = f"PEFT can't go on training a saved {adapter.type}"
        return [Problem(what, "adapter.from", fix="merge it (finetune merge), and train on what comes out")]
    type_saved = str(getattr(saved.get("peft_type"), "value", saved.get("peft_type"))).lower()
    type_saved = f"{type_saved} {_variant(saved)}".strip()
    type_asked = f"{kind.peft} {_variant(kind.sets)}".strip()
    if type_saved != type_asked:
        found.append(
            Problem("is an adapter of another type", "adapter.from", found=type_saved, expected=type_asked)
        )
    for key, value in adapter.options().items():
        have = saved.get(key)
        same = set(value) == set(have or ()) if isinstance(value, list) else value == have
        if not same and value != "all-linear":
            what = "differs from what the adapter was made with"
            found.append(Problem(what, f"adapter.{key}", found=str(value), expected=str(have), fix="drop it"))
    if not adapter.ours("from_other_base"):
        of, commit = str(saved.get("base_model_name_or_path")), saved.get("revision")
        same = of == base or (Path(of).exists() and Path(base).exists() and Path(of).samefile(base))
        if not same or (commit and revision and commit != revision):
            fix = "the base it was trained on, or from_other_base: true if that is what you want"
            expected = f"{base} {revision or ''}".strip()
            what = "was trained on another base"
            found.append(
                Problem(
                    what, "adapter.from", found=f"{of} {commit or ''}".strip(), expected=expected, fix=fix
                )
            )
    return found


def _variant(options: Any) -> str:
    return " ".join(key for key in ("use_dora", "use_rslora") if options.get(key))


def _go_on(model: PreTrainedModel, adapter: Adapter, ledger: Ledger) -> Any:
    """The adapter of `adapter.from`, to be trained further; every tensor of its file must be in the model."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    source = str(_source_folder(str(adapter.source)) or adapter.source)
    saved = PeftConfig.from_pretrained(source).to_dict()
    commit = getattr(model.config, "_commit_hash", None)
    problems = _source_problems(saved, adapter, str(model.name_or_path), commit)
    if problems:
        raise UserError(*problems)
    adapted = PeftModel.from_pretrained(model, source, is_trainable=True)
    on_disk, live = load_peft_weights(source, device="cpu"), get_peft_model_state_dict(adapted)
    equal = sum(
        name in live and bool((live[name].float().cpu() == tensor.float()).all())
        for name, tensor in on_disk.items()
    )
    how = "tensors of its file, compared with the model's"
    ledger.add(
        "adapter.from", f"all {len(on_disk)} of {source}", f"all {equal} of {source}", how, code=Exit.ARTEFACT
    )
    return adapted


def _check_names(model: PreTrainedModel, adapter: Adapter) -> None:
    """Names and numbers of the recipe that nothing in the model answers to are errors, all at once."""
    options = adapter.options()
    kind = adapter_types.find(adapter.type)
    problems = modules.problems(options, names(model), any_module=kind.peft in adapter_types.NOT_LINEAR)
    embedding: Any = model.get_input_embeddings()
    rows = len(embedding.weight)
    for key in ("trainable_token_indices", "token_indices"):
        given = options.get(key) or ()
        tokens = [token for ids in given.values() for token in ids] if isinstance(given, dict) else given
        beyond = [token for token in tokens if not 0 <= token < rows]
        if beyond:
            texts = {"found": ", ".join(map(str, beyond)), "expected": f"0 to {rows - 1}"}
            problems.append(Problem("the model has no such token", f"adapter.{key}", **texts))
    if problems:
        raise UserError(*problems)


def _train_rows(model: PreTrainedModel, config: Any, adapter: Adapter, added: Sequence[int]) -> None:
    """New tokens need rows that train: in the embeddings, and in the head if it has its own."""
    if not added or config.modules_to_save or getattr(config, "trainable_token_indices", None):
        return
    if not hasattr(config, "trainable_token_indices"):
        what, fix = (
            f"{adapter.type} has no way to train them",
            "adapter.modules_to_save: [embed_tokens, lm_head]",
        )
        raise UserError(Problem(what, "model.add_tokens", found=f"{len(added)} new tokens", fix=fix))
    tied = model.config.get_text_config().tie_word_embeddings
    both = {"embed_tokens": list(added), "lm_head": list(added)}
    config.trainable_token_indices = list(added) if tied else both


def _add_receipts(adapted: Any, adapter: Adapter, known: modules.Names, ledger: Ledger) -> None:
    """Type, modules by name, ranks, and what else trains: read back from the live model."""
    config, kind = adapted.peft_config["default"], adapter_types.find(adapter.type)
    asked = " ".join([kind.peft.upper(), *(f"with {key}" for key in kind.sets)])
    got = str(getattr(config.peft_type, "value", config.peft_type))
    got = " ".join([got, *(f"with {key}" for key in kind.sets if getattr(config, key, None))])
    ledger.add("adapter.type", asked, got, "the live PEFT config")
    options = adapter.options()
    changed = Counter(modules.short(name) for name in getattr(adapted, "targeted_module_names", ()))
    if changed:
        targets = options.get("target_modules")
        expected = changed if targets is None or adapter.source else _expected(options, known)
        ledger.add(
            "adapter.target_modules", _counts(expected), _counts(changed), "adapted modules, counted by name"
        )
    if options.get("rank_pattern"):
        ranks = Counter(
            f"r={len(weight)}" for name, weight in adapted.named_parameters() if "lora_A." in name
        )
        ok = len(ranks) > 1 or len(set(options["rank_pattern"].values())) == 1
        ledger.add("adapter.rank_pattern", options["rank_pattern"], _counts(ranks), "rows of each A", ok=ok)
    for key, part in (
        ("modules_to_save", ".modules_to_save."),
        ("trainable_token_indices", "trainable_tokens_delta"),
    ):
        if options.get(key):
            trained = {n for n in trainable(adapted) if part in n}
            ledger.add(
                f"adapter.{key}",
                options[key],
                f"{len(trained)} tensors train",
                "parameters with requires_grad",
                ok=bool(trained),
            )
    parameters = getattr(adapted, "targeted_parameter_names", ())
    if options.get("target_parameters"):
        ledger.add(
            "adapter.target_parameters",
            options["target_parameters"],
            f"{len(parameters)} parameters",
            "the live PEFT model",
            ok=bool(parameters),
        )
    _count_trainable(adapted, ledger)


def _expected(options: dict[str, Any], known: modules.Names) -> Counter[str]:
    """The layers that PEFT's rules pick, counted by name: targets, less exclusions, in the layers named."""
    targets, excluded = options["target_modules"], options.get("exclude_modules") or []
    layers, saved = options.get("layers_to_transform"), options.get("modules_to_save") or []
    wanted = None if layers is None else {layers} if isinstance(layers, int) else set(layers)
    candidates = known.linear if targets == "all-linear" else known.modules

    def picked(name: str) -> bool:
        if not any(modules.match(targets, [name]).values()):
            return False
        if any(modules.match(excluded, [name]).values()) or any(modules.match(saved, [name]).values()):
            return False
        number = re.search(r"\.(\d+)\.", name)
        return wanted is None or (number is not None and int(number[1]) in wanted)

    return Counter(modules.short(name) for name in candidates if picked(name))


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


def _count_trainable(model: torch.nn.Module, ledger: Ledger) -> None:
    count = sum(parameter.numel() for parameter in trainable(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    if hasattr(model, "get_nb_trainable_parameters"):  # knows that a 4-bit code holds two weights
        count, total = model.get_nb_trainable_parameters()  # type: ignore[operator]  (a PeftModel's method)
    share = f"{count:,} of {total:,} ({count / total:.2%})"
    how = "parameters with requires_grad"
    ledger.add("trainable parameters", "> 0", share, how, ok=count > 0, code=Exit.TRAINING)

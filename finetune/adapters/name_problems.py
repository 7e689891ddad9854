"""Find names and numbers in an adapter's options that the model does not have.

`check`, `plan` and `train` call these functions. They need no torch: the names come from `module_lists.read`
or, in a run, from the model itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.adapters import expert_targets, target_modules, untrainable_layers
from finetune.core.errors import Problem, nearest, raise_if_any
from finetune.core.formatting import as_yaml
from finetune.models import module_lists, module_names
from finetune.models.module_names import short
from finetune.recipe import adapter_types
from finetune.recipe.adapter_rules import coded
from finetune.recipe.adapter_types import REBASING_INITS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from transformers import PreTrainedModel

    from finetune.adapters.expert_targets import Resolved
    from finetune.models.module_names import Names
    from finetune.recipe.schema import Adapter


ON_HEAD = "an adapter on the output head would get no gradient"
HEAD_WEIGHT = "TRL's loss reads the weight of the head itself, without the adapter"
_PEFT_TIES = ("embed_tokens", "lm_head")  # PEFT's EMBEDDING_LAYER_NAMES


def check_options(options: Mapping[str, Any], names: Names, peft: str) -> list[Problem]:
    """Return a problem for each name and number that the model lacks or the adapter type cannot use.

    Args:
        options: PEFT's options, from the recipe or from a PEFT config.
        peft: PEFT's name of the adapter type. The empty string is full fine-tuning.
    """
    if not peft:
        return []
    options = target_modules.with_targets(options, peft, names)
    if options.get("target_modules") == expert_targets.WITH_EXPERTS and (refused := _no_experts(names, peft)):
        return [refused]
    if slow := target_modules.slow_patterns(options, [*names.kinds, *names.tower_kinds]):
        return slow
    resolved = expert_targets.resolve(options, names, peft)
    kinds = adapter_types.layer_kinds(peft)
    adaptable = [n for n in names.modules if kinds is None or (names.kinds[n] in kinds and n != names.head)]
    picked = resolved.modules
    found = _targets(options, names, peft, adaptable, resolved)
    found += _layers(options, names)
    found += _heads_and_embeddings(options, names, peft, picked)
    for key in ("exclude_modules", "feedforward_modules"):
        wanted = options.get(key) or ()
        lost = unmatched(wanted, list(names.kinds) if key == "exclude_modules" else adaptable, key)
        found += [
            replace(problem, fix=_unless_usual(problem.fix, problem) or "remove it") for problem in lost
        ]
    found += _feedforward(options)
    adapted = picked if picked and not options.get("target_parameters") else adaptable
    adapted = [*adapted, *expert_targets.parameter_ranks(resolved.options, names)]
    for key in ("rank_pattern", "alpha_pattern"):
        found += _patterns(options.get(key) or {}, adapted, key)
    found += _saved(options, names)
    found += _parameters(options, names, picked)
    found += _tokens(options, names, peft)
    return found or _experts(options, names, resolved)


def unmatched(targets: str | Iterable[str], names: Collection[str], key: str) -> list[Problem]:
    """Return a problem for each target without a match, with the most similar and the available names."""
    available = list(dict.fromkeys(map(short, names)))
    return [_no_module(target, targets, available, key) for target in _without_match(targets, names)]


def _unless_usual(near: str, problem: Problem) -> str:
    """Return the most similar name, or an empty string if the problem names a module of another family."""
    usual = any(f'"{name}"' in problem.what for name in module_lists.usual_names())
    return "" if usual else near


def _without_match(targets: str | Iterable[str], names: Collection[str]) -> list[str]:
    return [target for target, count in target_modules.match(targets, names).items() if not count]


def _no_module(
    target: str, targets: str | Iterable[str], available: list[str], key: str = "target_modules"
) -> Problem:
    """Return the problem of a target that matches no module."""
    available = [name for name in available if not name.isdecimal()]  # layers of a ModuleList have such names
    listed = [] if isinstance(targets, str) else list(targets)
    place = f"adapter.{key}.{listed.index(target)}" if listed else f"adapter.{key}"
    near, parts = nearest(target, available), _listed(target, available)
    fix = _with_name(key, listed or [target], target, near)
    if parts and not listed:
        fix = f"{key}: [{', '.join(parts)}]"
    elif len(parts) > 1:
        others = [other for other in listed if other != target]
        fix = f"{key}: [{', '.join(dict.fromkeys([*others, *parts]))}]"
    return Problem(
        f'"{target}" matches no module of this model',
        place,
        found=_modules(available),
        fix=fix,
        why="a string is a regular expression for whole names" if parts and not listed else "",
        code="target-modules",
    )


def _modules(available: Collection[str]) -> str:
    return f"the modules {', '.join(available)}" if available else ""


def _with_name(key: str, listed: Iterable[str], target: str, near: str) -> str:
    """Return the line of a recipe with another name in place of one target."""
    return f"{key}: [{', '.join(near if one == target else one for one in listed)}]" if near else ""


def _listed(target: str, available: Collection[str]) -> list[str]:
    """Split a text at commas, bars or spaces into module names; an empty list if a part resembles no name."""
    parts = [nearest(part, available) for part in re.split(r"[,|\s]+", target.strip(" ,[]()")) if part]
    return list(dict.fromkeys(parts)) if all(parts) else []


def describe_without_gradient(
    lost: Collection[str],
    picked: Collection[str],
    options: Mapping[str, Any],
    peft: str,
    why: str = untrainable_layers.UNREAD,
) -> Problem:
    """Return the problem of modules on which an adapter would get no gradient.

    Args:
        lost: full names of the modules.
        picked: full names of all modules that get an adapter.
    """
    layers = ", ".join(_endings(lost, picked))
    return Problem(
        f"an adapter on {layers} would get no gradient",
        "adapter.target_modules",
        found=f"{len(lost)} modules, such as {sorted(lost)[0]}",
        fix=_leave_out(lost, picked, options, peft),
        why=why,
        code="no-gradient",
    )


def describe_failing(
    layer: str, picked: Collection[str], options: Mapping[str, Any], peft: str, said: str
) -> Problem:
    """Return the problem of a layer in which the adapter raises an error.

    Args:
        layer: the full name of the layer. The problem covers the same layer of other decoder layers.
        picked: full names of all modules that get an adapter.
        said: the text of the error.
    """
    pattern = re.escape(re.sub(r"\d+", "0", layer)).replace("0", r"\d+")
    lost = [name for name in picked if re.fullmatch(pattern, name)] or [layer]
    return Problem(
        f"PEFT's {peft} does not run in {', '.join(_endings(lost, picked))} of this model",
        "adapter.target_modules",
        found=said,
        fix=_leave_out(lost, picked, options, peft),
        code="target-modules",
    )


def _endings(lost: Collection[str], picked: Collection[str]) -> list[str]:
    """Return the shortest endings that only these names have, such as `mixer.norm` if there is another
    `norm`.
    """
    others, endings = set(picked) - set(lost), set[str]()
    for name in lost:
        parts = name.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        endings.add(
            next((end for end in ends if not any(target_modules.match([end], others).values())), name)
        )
    return sorted(endings)


def _leave_out(lost: Collection[str], picked: Collection[str], options: Mapping[str, Any], peft: str) -> str:
    """Return the change of the recipe that excludes these modules."""
    endings, targets = _endings(lost, picked), options.get("target_modules")
    if isinstance(targets, list) and set(endings) <= set(targets):
        return f"remove {', '.join(endings)} from target_modules"
    if "exclude_modules" in adapter_types.find(peft).keys:
        own = options.get("exclude_modules") or ()
        own_targets = () if isinstance(own, str) else own
        return f"exclude_modules: [{', '.join(dict.fromkeys([*own_targets, *endings]))}]"
    others = set(picked) - set(lost)
    return f"target_modules: [{', '.join(sorted(_endings(others, picked)))}]"


def _targets(
    options: Mapping[str, Any], names: Names, peft: str, adaptable: list[str], resolved: Resolved
) -> list[Problem]:
    """Return problems of targets without a match, and of modules that the adapter type cannot change."""
    targets, key, picked = options.get("target_modules"), "adapter.target_modules", resolved.modules
    if targets is None:
        if peft not in adapter_types.OWN_TARGETS:
            return []
        return [
            Problem(
                f"PEFT has no default modules of {peft} for {names.family}",
                key,
                fix=_suggested(peft, names),
                code="target-modules",
            )
        ]
    if targets in (target_modules.EVERYTHING, expert_targets.WITH_EXPERTS):
        lost = [] if names.linear else [str(targets)]
    else:
        lost = [one for one in _without_match(targets, list(names.kinds)) if one not in resolved.named]
    if lost and not (resolved.half and all(expert_targets.OLD_NAMES & {short(one)} for one in lost)):
        return [_no_target(target, names, adaptable, options, peft) for target in lost]
    if resolved.half:
        return [_half(resolved.half, targets)]
    if not picked and not resolved.options.get("target_parameters"):
        if not targets:
            return [
                Problem(
                    "the list of target modules is empty",
                    key,
                    found=as_yaml(targets),
                    fix=_suggested(peft, names),
                    code="target-modules",
                )
            ]
        limits = ("exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
        limiting = ", ".join(name for name in limits if options.get(name) is not None)
        return [
            Problem(
                "no module is left for an adapter after the exclusions",
                key,
                found=f"{targets} with {limiting}",
                fix=f"remove {limiting}",
                code="target-modules",
            )
        ]
    usable = {*adaptable, names.head}
    unfit = {name: names.kinds[name] for name in picked if name not in usable}
    if unfit:
        return [
            Problem(
                f"{peft} can't adapt these modules",
                key,
                found=", ".join(f"{short(name)} ({kind})" for name, kind in _one_of_each(unfit).items()),
                expected=", ".join(dict.fromkeys(map(short, adaptable))) or "none",
                fix=_suggested(peft, names),
                code="target-modules",
            )
        ]
    return _untrainable(names, picked, options, peft)


def _one_of_each(unfit: Mapping[str, str]) -> dict[str, str]:
    """Keep one module for each last name and class."""
    return {name: kind for (_, kind), name in {(short(n), k): n for n, k in unfit.items()}.items()}


def _no_target(
    target: str, names: Names, adaptable: list[str], options: Mapping[str, Any], peft: str
) -> Problem:
    """Return the problem of a target without a match, with the names that the adapter type supports."""
    available, experts = list(dict.fromkeys(map(short, adaptable))), _expert_parameters(names)
    problem = _no_module(target, options["target_modules"], available)
    found, fix = problem.found or "no layer that this type adapts", problem.fix
    if not fix and names.linear and re.fullmatch(r"(all[-_ ]?)?linear", target.strip().lower()):
        fix = f"target_modules: {target_modules.EVERYTHING}"
    words = set(re.findall(r"[A-Za-z_]\w*", target)) - set(available)
    if not fix or words & module_lists.usual_names():  # a name of another family is not a misspelling
        fix = _in_place_of(target, options, names, peft)
        fix += ", and remove feedforward_modules" if options.get("feedforward_modules") else ""
    if experts and _means_experts(target, experts):
        fix = _experts_instead(options, names, peft)
        found += f"; parameters of experts: {', '.join(experts)}"
    return replace(problem, found=found, fix=fix)


def _in_place_of(target: str, options: Mapping[str, Any], names: Names, peft: str) -> str:
    """Return the change of the recipe that replaces names of another family by names of this model."""
    usable = _usable(peft, names)
    attention = [name for name in _attention(names) if name in usable]
    if not attention or not re.search(r"attn|attention|query|qkv|[qkvo]_proj", target):
        return _suggested(peft, names)
    targets = options.get("target_modules")
    listed = [] if isinstance(targets, str) else targets or []
    matching = [one for one in listed if any(target_modules.match([one], names.kinds).values())]
    return f"target_modules: [{', '.join(dict.fromkeys([*matching, *attention]))}]"


def _means_experts(target: str, experts: list[str]) -> bool:
    """Return whether a target is an old name of an expert layer or a parameter of one."""
    last = target.rpartition(".")[2]
    return last in expert_targets.OLD_NAMES or any(target_modules.is_suffix(target, name) for name in experts)


def _experts_instead(options: Mapping[str, Any], names: Names, peft: str) -> str:
    """Return the change that trains the experts, or attention if the adapter type can't train experts."""
    if peft != "lora" or options.get("use_dora"):
        return f"target_modules: [{', '.join(_attention(names))}]"
    targets, experts = options.get("target_modules"), _expert_parameters(names)
    others = [] if isinstance(targets, str) else targets or []
    remaining = ", ".join(one for one in others if not _means_experts(one, experts))
    fix = f"target_modules: [{remaining}] and target_parameters: [{', '.join(experts)}]"
    return f"{fix} and lora_dropout: 0" if options.get("lora_dropout") else fix


def _attention(names: Names) -> list[str]:
    """Return the last names of the linear layers of attention."""
    return list(dict.fromkeys(short(n) for n in names.linear if "attn" in n or "attention" in n))


def _expert_parameters(names: Names) -> list[str]:
    """Return the ends of the names of stacked experts, such as `mlp.experts.gate_up_proj`."""
    stacked = (name for name, shape in names.shapes.items() if len(shape) == 3 and "experts" in name)
    return list(dict.fromkeys(".".join(name.split(".")[-3:]) for name in stacked))


def _suggested(peft: str, names: Names) -> str:
    """Return targets that the adapter type can have in this model."""
    kinds = adapter_types.layer_kinds(peft)
    if kinds is None:
        norms = [name for name in names.modules if "norm" in names.kinds[name].lower()]
        return f"target_modules: [{', '.join(dict.fromkeys(map(short, norms)))}]"
    usable = _usable(peft, names)
    if not usable:
        return "adapter.type: lora"
    ia3 = [name for name in usable if name in ("k_proj", "v_proj", "down_proj")]
    return f"target_modules: [{', '.join(ia3 if peft == 'ia3' and ia3 else usable)}]"


def _usable(peft: str, names: Names) -> Collection[str]:
    """Return the last names of linear layers that the adapter type supports and that get a gradient."""
    kinds, lost = adapter_types.layer_kinds(peft), untrainable_layers.reasons(names, peft)
    return dict.fromkeys(
        short(name)
        for name in names.linear
        if names.kinds[name] in (kinds or module_names.LINEAR)
        and name not in lost
        and not short(name).isdecimal()  # a layer of a Sequential; decoder layers have such names too
    )


def _untrainable(names: Names, picked: list[str], options: Mapping[str, Any], peft: str) -> list[Problem]:
    """Return a problem for each reason for which an adapter would not train on targeted modules."""
    if refused := sorted(
        {short(name) for name in untrainable_layers.refused_by_peft(names, peft) & set(picked)}
    ):
        return [
            Problem(
                f"PEFT does not adapt {' and '.join(refused)} of {names.family}",
                "adapter.target_modules",
                found=as_yaml(options.get("target_modules")),
                fix=_suggested(peft, names),
                why="Mamba's kernels read these weights",
                code="target-modules",
            )
        ]
    why = untrainable_layers.reasons(names, peft)
    lost = [name for name in picked if name in why]
    return [
        describe_without_gradient([n for n in lost if why[n] == reason], picked, options, peft, reason)
        for reason in dict.fromkeys(why[name] for name in lost)
    ]


def _layers(options: Mapping[str, Any], names: Names) -> list[Problem]:
    """Return problems of `layers_to_transform`: missing layers, or targets that are a regular expression."""
    wanted, key = options.get("layers_to_transform"), "adapter.layers_to_transform"
    targets = options.get("target_modules")
    numbers = [wanted] if isinstance(wanted, int) else wanted or ()
    missing = [number for number in numbers if not 0 <= number < names.layers]
    if missing:
        return [
            Problem(
                "the model has no layer with this number",
                key,
                found=", ".join(map(str, missing)),
                expected=f"0 to {names.layers - 1}",
                fix=f"use a number from 0 to {names.layers - 1}",
                code="target-modules",
            )
        ]
    if wanted is not None and isinstance(targets, str) and targets != target_modules.EVERYTHING:
        listed = [name for name in names.kinds if target_modules.match(targets, [name])[targets]]
        fix = f"target_modules: [{', '.join(dict.fromkeys(map(short, listed)))}]"
        return [
            Problem(
                "PEFT ignores `layers_to_transform` if `target_modules` is a regular expression",
                key,
                found=as_yaml(wanted),
                fix=f"{fix}, or remove `layers_to_transform`",
                code="target-modules",
            )
        ]
    return []


def _heads_and_embeddings(
    options: Mapping[str, Any], names: Names, peft: str, picked: list[str]
) -> Iterator[Problem]:
    """Find adapters on the head or on embeddings that training or saving does not support."""
    if names.head and names.head in picked:
        head = short(names.head)
        saved = dict.fromkeys([*(options.get("modules_to_save") or ()), head])
        fix = f"modules_to_save: [{', '.join(saved)}]"
        yield Problem(
            ON_HEAD,
            "adapter.target_modules",
            found=head,
            fix=fix if len(picked) > 1 else f"target_modules: all-linear and {fix}",
            why=HEAD_WEIGHT,
            code="no-gradient",
        )
    elif names.tied and names.embedding in picked and _ties_head(options):
        yield Problem(
            "`ensure_weight_tying` puts the adapter of the embeddings on the output head too",
            "adapter.ensure_weight_tying",
            found=f"target_modules with {short(names.embedding)}",
            fix="remove `ensure_weight_tying`",
            why=HEAD_WEIGHT,
            code="no-gradient",
        )
    if peft == "trainable_tokens" and names.tied and names.embedding in picked:
        yield adapter_on_head(peft, options.get("token_indices"))
    init = str(options.get("init_lora_weights"))
    rows = [name for name in picked if names.kinds[name] == "Embedding"]
    if init.startswith(REBASING_INITS) and rows:
        yield Problem(
            f"{init} excludes an adapter on the embeddings",
            "adapter.target_modules",
            found=", ".join(rows),
            fix="init_lora_weights: true",
            why="finetune saves it as the difference of two LoRA adapters",
            code="recipe-conflict",
        )


def _ties_head(options: Mapping[str, Any]) -> bool:
    """Return whether PEFT gives a tied head the adapter of the embeddings.

    PEFT knows embeddings only by their usual names (peft 0.21.2, tuners/tuners_utils.py,
    _check_tied_modules).
    """
    targets, saved = options.get("target_modules") or (), options.get("modules_to_save") or ()
    if not options.get("ensure_weight_tying") or any(short(name) in _PEFT_TIES for name in saved):
        return False
    if isinstance(targets, str):
        return any(target_modules.match(targets, _PEFT_TIES).values())
    return any(short(target) in _PEFT_TIES for target in targets)


def adapter_on_head(kind: str, tokens: object = None) -> Problem:
    """Return the problem of an adapter that PEFT puts on the output head.

    Args:
        tokens: the tokens that `trainable_tokens` trains.
    """
    fix = "adapter.type: lora"
    fix += f" and trainable_token_indices: {tokens or '[0]'}" if kind == "trainable_tokens" else ""
    return Problem(
        ON_HEAD, "adapter", found=f"{kind} on the output head", fix=fix, why=HEAD_WEIGHT, code="no-gradient"
    )


def _feedforward(options: Mapping[str, Any]) -> list[Problem]:
    """Check that IA3's feed-forward modules are also targets. PEFT compares the exact strings."""
    targets, forward = options.get("target_modules"), options.get("feedforward_modules")
    if not isinstance(targets, list) or not isinstance(forward, list) or set(forward) <= set(targets):
        return []
    beside = ", ".join(name for name in forward if name not in targets)
    return [
        Problem(
            "these modules are not in `target_modules`",
            "adapter.feedforward_modules",
            found=beside,
            expected=", ".join(targets),
            fix=f"target_modules: [{', '.join([*targets, beside])}]",
            why="IA3 scales the inputs of feed-forward modules, so they must be targets",
            code="target-modules",
        )
    ]


def _saved(options: Mapping[str, Any], names: Names) -> Iterator[Problem]:
    """Return problems of names in `modules_to_save` that the model does not have."""
    for index, target in enumerate(options.get("modules_to_save") or ()):
        if not any(name.endswith(target) for name in names.modules):  # PEFT's rule: "norm" is every norm
            lost = unmatched([target], names.modules, "modules_to_save")
            fix = _with_name("modules_to_save", options["modules_to_save"], target, _end_of(target, names))
            yield from (
                replace(problem, key=f"adapter.modules_to_save.{index}", fix=fix or problem.fix)
                for problem in lost
            )


def _end_of(target: str, names: Names) -> str:
    """Return this model's name of the embeddings or head, if the target is another family's name of it."""
    if target in ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings"):
        return short(names.embedding)
    return short(names.head) if target in ("lm_head", "embed_out", "output", "head") else ""


def _tokens(options: Mapping[str, Any], names: Names, peft: str) -> Iterator[Problem]:
    """Return problems of token ids outside of the vocabulary, and of modules that hold no embeddings."""
    rows = names.shapes.get(f"{names.embedding}.weight", (0,))[0]
    if peft == "trainable_tokens" and not options.get("token_indices"):
        yield Problem(
            "the list of tokens to train is empty",
            "adapter.token_indices",
            fix="token_indices: [0]",
            code="missing-key",
        )
    for key in ("trainable_token_indices", "token_indices"):
        token_ids = options.get(key) or ()
        for target in (
            (one for one, ids in token_ids.items() if not ids) if isinstance(token_ids, dict) else ()
        ):
            yield Problem(
                "the list of tokens to train is empty",
                f"adapter.{key}.{target}",
                fix=f"remove `{target}`",
                code="missing-key",
            )
        tokens = (
            [token for ids in token_ids.values() for token in ids]
            if isinstance(token_ids, dict)
            else token_ids
        )
        beyond = [token for token in tokens if not 0 <= token < rows]
        if beyond:
            yield Problem(
                "the model has no token with this id",
                f"adapter.{key}",
                found=", ".join(map(str, beyond)),
                expected=f"0 to {rows - 1}",
                fix=f"use ids from 0 to {rows - 1}",
                code="token-limit",
            )
        holders = [name for name in (names.embedding, names.head) if name]
        for target in token_ids if isinstance(token_ids, dict) else ():
            if not any(name.endswith(target) for name in holders):
                lost = unmatched([target], holders, key)
                near = _end_of(target, names) or nearest(target, [*map(short, holders)])
                fix = f"rename it to `{near}`" if near else ""
                yield from (replace(problem, key=f"adapter.{key}.{target}", fix=fix) for problem in lost)


def _patterns(pattern: Mapping[str, Any], names: Collection[str], key: str) -> Iterator[Problem]:
    """Return problems of keys without a match, and of keys that give one module different values.

    A key is a regular expression for the end of a name (PEFT's `get_pattern_key`). PEFT takes the first key
    that matches. It saves keys in alphabetical order, so another key may come first in the saved adapter.
    Then PEFT can't load the adapter.
    """
    available = [name for name in dict.fromkeys(map(short, names)) if not name.isdecimal()]
    # Compile each pattern once, because the cache of `re` holds only 512 patterns.
    ends = {one: re.compile(rf"(.*\.)?({one})$") for one in pattern}
    hits = {name: [one for one, end in ends.items() if end.match(name)] for name in names}
    used = {one for matching in hits.values() for one in matching}
    for lost in (one for one in pattern if one not in used):
        problem = Problem(
            f'"{lost}" matches no module that gets an adapter',
            f"adapter.{key}.{lost}",
            found=_modules(available),
            code="target-modules",
        )
        near = _unless_usual(nearest(lost, available), problem)
        yield replace(problem, fix=f"rename it to `{near}`" if near else f"remove `{lost}`")
    twice = {(them[0], min(them)): name for name, them in hits.items() if them}
    for (first, saved), name in twice.items():
        if pattern[first] == pattern[saved]:
            continue
        depth = len(saved) - len(saved.lstrip("(")) + 1  # "(" sorts before the characters of names
        early = "(" * depth + first + ")" * depth
        yield Problem(
            f'"{first}" and "{saved}" match the same module',
            f"adapter.{key}",
            found=name,
            fix=f'"{early}" in place of "{first}", which stays the first',
            why="PEFT uses the first one and sorts them",
            code="target-modules",
        )


def _parameters(options: Mapping[str, Any], names: Names, picked: list[str]) -> Iterator[Problem]:
    """Return problems of `target_parameters` (peft 0.21.2, tuners/lora/layer.py, ParamWrapper)."""
    targets = options.get("target_parameters") or ()
    # Three parts, such as `mlp.experts.down_proj`, because several parameters may have the same last two
    weights = [name for name, shape in names.shapes.items() if "." in name and len(shape) in (2, 3)]
    available = list(dict.fromkeys(".".join(name.split(".")[-3:]) for name in weights))
    for index, target in enumerate(targets):
        key = f"adapter.target_parameters.{index}"
        matched = [name for name in names.shapes if target_modules.is_suffix(target, name)]
        sizes = {len(names.shapes[name]) for name in matched}
        holders = {name.rpartition(".")[0] for name in matched}
        if not matched:
            yield Problem(
                f'"{target}" matches no parameter of this model',
                key,
                found=f"the parameters {', '.join(_expert_parameters(names) or available)}",
                fix=_with_name(
                    "target_parameters",
                    targets,
                    target,
                    nearest(target, available) or nearest(target, {*map(short, available)} - {"weight"}),
                ),
                code="target-modules",
            )
        elif sizes - {2, 3}:
            yield Problem(
                f'"{target}" matches a parameter with {min(sizes)} dimension',
                key,
                found=matched[0],
                expected="a weight of a linear layer or of experts, with 2 or 3 dimensions",
                fix=f"remove {target} from the list",
                code="target-modules",
            )
        elif holders & set(picked):
            yield Problem(
                f'`target_modules` adapts the module of "{target}" already',
                key,
                found=matched[0],
                fix=f"remove {target} from target_parameters",
                code="target-modules",
            )
        elif names.head in holders:
            yield Problem(
                ON_HEAD,
                key,
                found=target,
                fix=f"remove it, and set modules_to_save: [{short(names.head)}]",
                why=HEAD_WEIGHT,
                code="no-gradient",
            )
    yield from _unlike_lora(options, bool(targets), "adapter.target_parameters")


def _unlike_lora(options: Mapping[str, Any], parameters: bool, key: str) -> list[Problem]:
    """Return problems of LoRA options that PEFT does not support for parameters."""
    options_set = [one for one in ("lora_dropout", "lora_bias", "use_dora") if options.get(one)]
    if not parameters or not options_set:
        return []
    return [
        Problem(
            f"PEFT has no {' and no '.join(options_set)} for parameters such as the weights of experts",
            key,
            found=", ".join(f"{one}: {options[one]}" for one in options_set),
            fix="adapter.type: lora" if "use_dora" in options_set else f"remove {' and '.join(options_set)}",
            code="adapter-option",
        )
    ]


def _experts(options: Mapping[str, Any], names: Names, resolved: Resolved) -> list[Problem]:
    """Return problems of LoRA options that PEFT does not support for the targeted experts."""
    found = _unlike_lora(options, bool(resolved.options.get("target_parameters")), "adapter.target_modules")
    every = options.get("target_modules") == expert_targets.WITH_EXPERTS
    other = target_modules.EVERYTHING if every else f"[{', '.join(_attention(names))}]"
    return [replace(one, fix=f"{one.fix}, or target_modules: {other}") for one in found]


def _half(layer: str, targets: str | Iterable[str] | None) -> Problem:
    """Return the problem of an expert layer that is targeted without the other layer of its parameter."""
    first, second = expert_targets.LAYERS["gate_up_proj"]
    place = (first if layer in first else second).index(layer)
    pair = first[place], second[place]
    other = next(one for one in pair if one != layer)
    what = f"PEFT adapts {' and '.join(pair)} of a mixture of experts only together"
    listed = [layer] if isinstance(targets, str) else list(targets or ())
    return Problem(
        what,
        "adapter.target_modules",
        found=layer,
        fix=f"target_modules: [{', '.join([*listed, other])}]",
        why="one parameter holds both",
        code="target-modules",
    )


def _no_experts(names: Names, peft: str) -> Problem | None:
    """Return the problem of "all-linear-and-experts", if the adapter type or the model has no experts."""
    target, key = expert_targets.WITH_EXPERTS, "adapter.target_modules"
    fix = f"target_modules: {target_modules.EVERYTHING}"
    if peft != "lora":
        return Problem(
            f"PEFT's {peft} can't adapt experts",
            key,
            found=target,
            expected="LoRA",
            fix=fix,
            code="target-modules",
        )
    if names.stacked_experts or any(".experts." in name for name in names.linear):
        return None
    what = "the model has no experts"
    if any("experts" in name for name in names.kinds):
        what = f"PEFT can't adapt the experts of {names.family}"
    return Problem(what, key, found=target, fix=fix, code="target-modules")


def check(model: PreTrainedModel, adapter: Adapter, known: Names) -> None:
    """Raise one error with all names and numbers of the recipe that match nothing in the model."""
    kind = adapter_types.find(adapter.type)
    options = {**adapter.options(), **kind.sets}
    refused = check_options(options, known, kind.peft)
    parts = list(model.named_modules())
    for name in options.get("modules_to_save") or ():
        storages = {module_names.stored_as(part) for at, part in parts if at.endswith(name)} - {""}
        refused += coded([name], storages.pop(), adapter.type if kind.storage else "") if storages else []
    raise_if_any(refused)

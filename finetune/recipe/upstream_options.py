"""Read the options of the installed libraries from their source, without importing them.

`SFTConfig` takes 5 s to import and does not check types. `ast` reads its fields in 20 ms. So the keys of
`train:` and `adapter:` are checked against the installed versions.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional, Union

from finetune.core import packages

SFT_CONFIG = (  # base classes first, so that a subclass's default wins
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/sft_config.py", "SFTConfig"),
)

Source = tuple[str, str, str]  # package, file, class
_ENUMS = (("transformers", "trainer_utils.py"), ("transformers", "training_args.py"))
_PLAIN = {
    "str": str,
    "int": int,
    "float": int | float,
    "bool": bool,
    "dict": dict,
    "list": list,
    "Any": Any,
}


@dataclass(frozen=True)
class UpstreamField:
    """A dataclass field of a library: its type, if a recipe can hold it, and its help text."""

    annotation: Any
    help: str
    nested: tuple[Source, ...] = ()
    """The config class of this field (`eva_config: EvaConfig`), if it has one."""


@cache
def fields(sources: tuple[Source, ...]) -> dict[str, UpstreamField]:
    """Return the dataclass fields of a class by name. `sources` lists its base classes first."""
    found: dict[str, UpstreamField] = {}
    for package, file, class_name in sources:
        enums = _enums() | _string_enums(package, file)
        for node in _class(package, file, class_name).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                nested = _nested(package, file, node.annotation)
                found[node.target.id] = UpstreamField(
                    _type(node.annotation, enums), _help(node.value), nested
                )
    return found


@cache
def peft_types() -> dict[str, str]:
    """Return every adapter type of the installed PEFT: PEFT's name -> its config class."""
    return {
        ast.literal_eval(options["name"]): ast.unparse(options["config_cls"])
        for path in sorted(packages.source_of("peft", "tuners").glob("*/__init__.py"))
        for options in _registrations(path)
    }


@cache
def peft_config(class_name: str) -> tuple[Source, ...]:
    """Return a config class of PEFT with its base classes first, without `PeftConfig`.

    The run sets the fields of `PeftConfig`.
    """
    stands = re.compile(rf"^class {class_name}\b", re.MULTILINE)
    file = next((file for file, text in _peft_configs().items() if stands.search(text)), "")
    if not file or class_name == "PeftConfig":
        return ()
    bases = _class("peft", file, class_name).bases
    return (*(s for base in bases for s in peft_config(ast.unparse(base))), ("peft", file, class_name))


@cache
def _peft_configs() -> dict[str, str]:
    """Return the text of the files with PEFT's config classes. Parsing all of them would take 0.1 s."""
    root = packages.source_of("peft", "")
    files = (root / "config.py", *sorted(root.glob("tuners/*.py")), *sorted(root.glob("tuners/*/config.py")))
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}


@cache
def trackers() -> frozenset[str]:
    """Return the names that `report_to` may hold."""
    callbacks = _dict("integrations/integration_utils.py", "INTEGRATION_TO_CALLBACK")
    return frozenset(ast.literal_eval(key) for key in callbacks.keys if key)


@cache
def schedules() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Return the required arguments and all arguments of each learning-rate schedule, by its name."""
    tree = _tree("transformers", "optimization.py")
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = _constants(_class("transformers", "trainer_utils.py", "SchedulerType"))
    by_type, made = _dict("optimization.py", "TYPE_TO_SCHEDULER_FUNCTION"), {}
    for key, value in zip(by_type.keys, by_type.values, strict=True):
        arguments = functions[ast.unparse(value)]
        takes = [argument.arg for argument in arguments.args]
        needs = takes[: len(takes) - len(arguments.defaults)]
        name = names[ast.unparse(key).removeprefix("SchedulerType.") if key else ""]
        made[name] = frozenset(needs), frozenset(takes)
    return made


def of_family(family: str, kind: str) -> str:
    """Return transformers' file of a model family; the empty string if there is none.

    Args:
        kind: configuration or modeling.
    """
    joined = family.replace("-", "").replace(".", "_")  # kosmos-2.5
    names = family, family.removesuffix("_text"), family.replace("-", "_"), joined, family.partition("-")[0]
    files = (f"models/{folder}/{kind}_{folder}.py" for folder in dict.fromkeys(names) if folder)
    return next((file for file in files if packages.source_of("transformers", file).exists()), "")


@cache
def causal_flags(family: str) -> dict[str, Any]:
    """Return the constants of transformers' model class for a family, including inherited ones.

    The result is empty if transformers has no class for the family.
    """
    file = of_family(family, "modeling")
    named = model_classes("CAUSAL_LM").get(family) or model_classes("IMAGE_TEXT_TO_TEXT").get(family)
    if not file or not named:
        return {}
    classes = {node.name: node for node in _tree("transformers", file).body if isinstance(node, ast.ClassDef)}
    found: dict[str, Any] = {}
    at = classes.get(named)
    while at:
        found = _constants(at) | found
        at = next((classes[name] for name in map(ast.unparse, at.bases) if name in classes), None)
    return found


@cache
def needed_inputs(family: str, class_name: str) -> list[str]:
    """Return the inputs, other than tokens, that the forward pass of a family's class needs.

    These are arguments without a default, and arguments for which the forward pass raises an error if they
    are `None`.
    """
    found: dict[str, None] = {}
    for function in _forwards(family, {class_name, re.sub(r"For[A-Z]\w+$", "Model", class_name)}):
        arguments = [argument.arg for argument in function.args.args]
        without_default = arguments[1 : len(arguments) - len(function.args.defaults)]
        found |= dict.fromkeys([*without_default, *_refused_if_none(function, arguments)])
    return [name for name in found if name not in ("input_ids", "inputs_embeds")]


def _forwards(family: str, class_names: set[str]) -> Iterator[ast.FunctionDef]:
    file = of_family(family, "modeling")
    for node in _tree("transformers", file).body if file else ():
        if isinstance(node, ast.ClassDef) and node.name in class_names:
            yield from (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "forward")


def _refused_if_none(function: ast.FunctionDef, arguments: list[str]) -> list[str]:
    """Return the arguments that a function tests for `None` directly before it raises an error."""
    branches = [node for node in ast.walk(function) if isinstance(node, ast.If)]
    tests = [ast.unparse(node.test) for node in branches if isinstance(node.body[0], ast.Raise)]
    alone = [test.removeprefix("self.training and ") for test in tests]
    return [name for name in arguments if f"{name} is None" in alone]


@cache
def masks_without_positions(family: str) -> bool:
    """Return whether a family's model makes a causal mask without `position_ids`.

    Such a mask has no borders between the examples of a packed sequence. Some models whose positions have
    several axes drop positions of one axis.
    """
    file = of_family(family, "modeling")
    text = packages.source_of("transformers", file).read_text(encoding="utf-8") if file else ""
    if "text_position_ids = None" in text and "expand(4," not in text:
        return True
    return any(
        isinstance(call, ast.Call)
        and re.fullmatch(r"create_\w*causal_mask", ast.unparse(call.func))
        and not _may_give_positions(call, function)
        for function in _model_functions(family)
        for call in ast.walk(function)
    )


def _may_give_positions(call: ast.Call, function: ast.FunctionDef) -> bool:
    """Return whether a call may pass `position_ids`, directly or through a `**` of unknown content."""
    dicts = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    spread = [dicts.get(ast.unparse(keyword.value)) for keyword in call.keywords if keyword.arg is None]
    return any(keyword.arg == "position_ids" for keyword in call.keywords) or any(
        one is None or "'position_ids'" in ast.unparse(one) for one in spread
    )


@cache
def kernel_packages(family: str) -> dict[str, str]:
    """Return functions of a family's layers that another package provides: function -> the package's module.

    Functions that only `generate` calls are excluded.
    """
    found = dict(pair for function in _model_functions(family) for pair in _kernels(function))
    return {name: package for name, package in found.items() if not name.endswith("_update")}


def _kernels(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """Return the functions of other packages that may replace a function, each with the package's module."""
    return [
        (ast.literal_eval(call.args[0]), ast.literal_eval(call.args[1]))
        for call in function.decorator_list
        if isinstance(call, ast.Call) and "func_from_hub_with_fallback" in ast.unparse(call.func)
    ]


class FusedLayer(NamedTuple):
    """A class of layers whose training forward pass is one function of another package."""

    package: str
    """The module that has the function, such as `mamba_ssm`."""
    reads: frozenset[str]
    """The submodules whose weights the function reads without a call of their forward."""


@cache
def fused_layers(family: str) -> dict[str, FusedLayer]:
    """Return the fused layers of a family by the name of their class.

    transformers writes the function as one that returns `None`, and calls the submodules if the package is
    not installed (5.22).
    """
    file = of_family(family, "modeling")
    classes = (
        (node for node in _tree("transformers", file).body if isinstance(node, ast.ClassDef)) if file else ()
    )
    functions = _fused_functions(family)
    found = dict[str, FusedLayer]()
    for node in classes if functions else ():
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            if package := functions.get(ast.unparse(call.func)):
                weights = re.findall(r"\bself\.(\w+)\.weight\b", ast.unparse(call))
                found[node.name] = FusedLayer(package, frozenset(weights))
    return found


def _fused_functions(family: str) -> dict[str, str]:
    """Return the functions that only another package implements: function -> the package's module."""
    found = dict[str, str]()
    for function in _model_functions(family):
        *_, last = function.body
        if isinstance(last, ast.Return) and last.value is not None and ast.unparse(last) == "return None":
            found[function.name] = next((package for _, package in _kernels(function)), "")
    return found


@cache
def kernel_without_borders(family: str) -> str:
    """Return a function of a family's layers that does not get the borders of packed examples, or nothing.

    Then its state crosses the borders, with the kernels of another package too.
    """
    functions = _model_functions(family)
    kernels = {function.name: _kernels(function)[0][0] for function in functions if _kernels(function)}
    for call in (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)):
        kernel = kernels.get(ast.unparse(call.func), "_update")
        given = {keyword.arg for keyword in call.keywords}
        if not kernel.endswith("_update") and not given & {None, "seq_idx", "cu_seqlens"}:
            return kernel
    return ""


@cache
def fixed_mask(family: str) -> bool:
    """Return whether a family's layers hold one causal mask of `max_position_embeddings` rows."""
    file = of_family(family, "modeling")
    text = packages.source_of("transformers", file).read_text(encoding="utf-8") if file else ""
    return "tril(torch.ones((max_positions" in text


def _model_functions(family: str) -> list[ast.FunctionDef]:
    """Return the functions and methods of a family's modeling file, without those for `generate`."""
    file = of_family(family, "modeling")
    nodes = ast.walk(_tree("transformers", file)) if file else ()
    found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return [function for function in found if function.name != "create_masks_for_generate"]


@cache
def moe_patterns() -> dict[str, str]:
    """Return the pattern by which PEFT adapts stacked expert weights, for each family with experts."""
    patterns = _dict("conversion_mapping.py", "_MODEL_TO_CONVERSION_PATTERN")
    return {**ast.literal_eval(patterns), "mixtral": "mixtral"}  # PEFT adds mixtral


@cache
def peft_modules(kind: str) -> dict[str, Any]:
    """Return PEFT's default modules by model family.

    Args:
        kind: a name in PEFT's constants, such as `IA3_TARGET` or `LNTUNING_TARGET`.
    """
    wanted = f"TRANSFORMERS_MODELS_TO_{kind}_MODULES_MAPPING"
    for node in _tree("peft", "utils/constants.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == wanted:
            return ast.literal_eval(node.value)
    raise AssertionError(f"PEFT has no {wanted}: upstream_options.py must follow it")


@cache
def model_classes(task: str) -> dict[str, str]:
    """Return transformers' model class of each family for a task such as CAUSAL_LM or MASKED_LM."""
    text = packages.source_of("transformers", "models/auto/modeling_auto.py").read_text(encoding="utf-8")
    _, found, rest = text.partition(f"MODEL_FOR_{task}_MAPPING_NAMES = ")
    assert found, f"transformers has no MODEL_FOR_{task}_MAPPING_NAMES: upstream_options.py must follow it"
    return dict(re.findall(r'\("([^"]+)", "(\w+)"\)', rest.partition("\n)\n")[0]))


@cache
def tokenizer_classes() -> dict[str, str]:
    """Return transformers' tokenizer class of each model family."""
    text = packages.source_of("transformers", "models/auto/tokenization_auto.py").read_text(encoding="utf-8")
    return dict(re.findall(r'\("([^"]+)",\s*"(\w+)"', text))


@cache
def runs_in_python(tokenizer_class: str) -> bool:
    """Return whether transformers runs a tokenizer class in Python, without the tokenizers library."""
    name = tokenizer_class.removesuffix("Fast")
    if name in ("", "PreTrainedTokenizer", "TokenizersBackend"):
        return tokenizer_class == "PreTrainedTokenizer"
    if name.startswith("MistralCommon") or name == "PythonBackend":
        return True
    models, word = packages.source_of("transformers", "models"), name.removesuffix("Tokenizer").lower()
    likely = [
        models / at / f"tokenization_{at}.py" for at in os.listdir(models) if at.replace("_", "") == word
    ]
    files = itertools.chain((file for file in likely if file.exists()), models.glob("*/tokenization_*.py"))
    texts = (file.read_text(encoding="utf-8") for file in files)
    found = (re.search(rf"^class {re.escape(name)}\((\w+)", text, re.MULTILINE) for text in texts)
    base = next(filter(None, found), None)
    return bool(base) and base[1] in ("PreTrainedTokenizer", "PythonBackend", "SentencePieceBackend")


def texts_beside_fields(file: Path, class_name: str) -> dict[str, str]:
    """Return the docstring below each annotated field of a class, by the field's name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@cache
def _tree(package: str, file: str) -> ast.Module:
    return ast.parse(packages.source_of(package, file).read_text(encoding="utf-8"))


def _class(package: str, file: str, name: str) -> ast.ClassDef:
    for node in _tree(package, file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{package}/{file} has no class {name}: upstream_options.py must follow it")


def _constants(node: ast.ClassDef) -> dict[str, Any]:
    """Return the class attributes that are constants, by name. They include the members of an enum."""
    return {
        ast.unparse(one.targets[0]): one.value.value
        for one in node.body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
    }


def _dict(file: str, name: str) -> ast.Dict:
    """Return the dict of this name in a file of transformers."""
    for node in _tree("transformers", file).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Dict)
            return node.value
    raise AssertionError(f"transformers has no {name}: upstream_options.py must follow it")


def _registrations(path: Path) -> list[dict[str, ast.expr]]:
    """Return the keywords of each `register_peft_method(...)` in a tuner's package."""
    return [
        {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_peft_method"
    ]


def _nested(package: str, file: str, annotation: ast.expr) -> tuple[Source, ...]:
    """Return the config classes of the same file that the annotation names."""
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    classes = {node.name for node in _tree(package, file).body if isinstance(node, ast.ClassDef)}
    return tuple((package, file, name) for name in sorted(names & classes) if name.endswith("Config"))


@cache
def _enums() -> dict[str, Any]:
    """Return the string enums that annotate `TrainingArguments`, each as the `Literal` of its values."""
    return {name: kind for place in _ENUMS for name, kind in _string_enums(*place).items()}


@cache
def _string_enums(package: str, file: str) -> dict[str, Any]:
    """Return the enums of a file by name, each as the `Literal` of its values."""
    return {
        node.name: Literal[tuple(_constants(node).values())]
        for node in _tree(package, file).body
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)
    }


def _type(node: ast.expr, enums: dict[str, Any]) -> Any:
    """Return an annotation as a type for pydantic; `Any` for types that a recipe can't hold."""
    if isinstance(node, ast.BinOp):  # X | Y
        return _union([node.left, node.right], enums)
    if isinstance(node, ast.Constant):
        return None if node.value is None else Any
    if isinstance(node, ast.Name):
        return enums.get(node.id, _PLAIN.get(node.id, Any))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        match node.value.id:
            case "Optional":
                return Optional[_type(arguments[0], enums)]  # noqa: UP045 (the operand may be a typing object)
            case "Union":
                return _union(arguments, enums)
            case "Literal":
                values = tuple(ast.literal_eval(a) for a in arguments)
                patterns = any("[" in str(value) for value in values)  # "pissa_niter_[number of iters]"
                return str if patterns else Literal[values]
            case "list":
                return list[_type(arguments[0], enums)]
            case "dict":
                key, value = arguments
                return dict[_type(key, enums), _type(value, enums)]
    return Any


def _union(nodes: list[ast.expr], enums: dict[str, Any]) -> Any:
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    if names & enums.keys():  # in `SchedulerType | str`, the string must be a value of the enum
        nodes = [n for n in nodes if not (isinstance(n, ast.Name) and n.id == "str")]
    types = [_type(n, enums) for n in nodes]
    known = tuple(t for t in types if t is not Any) or (Any,)
    return Union[known]  # noqa: UP007 (built from a tuple)


def _help(value: ast.expr | None) -> str:
    """Return the `metadata={"help": ...}` of a dataclass field, in one line."""
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg == "metadata":
                try:
                    return " ".join(str(ast.literal_eval(keyword.value).get("help", "")).split())
                except ValueError:  # the help text is built at run time
                    return ""
    return ""

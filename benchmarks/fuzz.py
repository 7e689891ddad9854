"""Change recipes at random, and check how finetune reads them.

finetune must accept a changed recipe, or refuse it and name the place of each problem. An accepted recipe
must stay the same after a run writes it and finetune reads it again.

    python benchmarks/reliability.py --fuzz 10000

A seed determines each change, so `fuzz.case(seed)` repeats a case.
"""

from __future__ import annotations

import copy
import random
import re
import string
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from finetune.core.errors import UserError
from finetune.recipe import adapter_types, build, loader, schema
from finetune.run_folder import settings_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).resolve().parent.parent
SLOWEST = 1.0  # seconds
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-308,
    float("inf"), float("-inf"), float("nan"), "", " ", "~", "null", "yes", "eight", "1e-4", "0x1F", "../..",
    "/etc/passwd", "~nobody/x", "*", "[", "(", "**/*", "%s", "{}", "{{ x }}", "${HOME}", "!!python/none",
    "a\nb", "a\tb", "\u0000", "\u202e", "é", "Ж", "🤗" * 40, "x" * 5000, "lora", "auto", "all-linear",
    "-----BEGIN PRIVATE KEY-----", [], {}, [None], [[]], [{}], {"": None}, {"a": {"b": {"c": {}}}},
    [1, "a", None, [2]], {"name": 1}, {"name": {"name": "x"}}, [0] * 300, {"q_proj": -1}, {1: 2},
]  # fmt: skip
WORDS = ["rank", "lr", "epochs", "batch_size", "learning_rat", "__class__", "model", "0", "-", "type", "ключ"]


class Outcome(NamedTuple):
    seed: int
    said: str
    """`valid`, `refused`, or the fault that was found."""
    seconds: float
    text: str


def case(seed: int) -> tuple[str, list[str]]:
    """The text of a recipe, and overrides."""
    draw = random.Random(seed)
    content = copy.deepcopy(draw.choice(_shipped()))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 5])):
        draw.choice(_CHANGES)(content, draw)
    text = _dump(content, draw)
    for _ in range(draw.choice([0, 0, 0, 0, 1, 3])):
        text = draw.choice(_TEXTS)(text, draw)
    overrides = [_override(draw) for _ in range(draw.choice([0, 0, 0, 0, 1, 2]))]
    return text, overrides


@cache
def _shipped() -> list[Any]:
    files = sorted((ROOT / "recipes").rglob("*.yaml"))
    return [yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader) for file in files]


def outcome(seed: int, path: Path) -> Outcome:
    """Write the case to `path`, and load it."""
    text, overrides = case(seed)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    started = time.monotonic()
    took = 0.0
    try:
        loaded = loader.load(path, overrides)
        took = time.monotonic() - started
        said = "valid" if again(loaded, path) else "valid, and another one when written and read again"
    except UserError as error:
        lost = [p for p in error.problems if not p.where or not p.what or len(str(p)) > 20_000]
        said = f"no place, or too long: {str(lost[0])[:300]}" if lost else "refused"
    except Exception as error:  # what is looked for
        said = f"{type(error).__name__}: {error}"[:300]
    took = took or time.monotonic() - started
    return Outcome(seed, said if took < SLOWEST else f"took {took:.1f} s", took, text)


def again(loaded: schema.Recipe, path: Path) -> bool:
    """Whether a recipe that is written as a run folder has it is the same one."""
    written = path.with_name(f"{path.stem}.resolved.yaml")
    written.write_text(settings_text.resolved_yaml(loaded, {}), encoding="utf-8")
    return loader.load(written).model_dump() == loaded.model_dump()


def run(seeds: Iterable[int], folder: Path) -> list[Outcome]:
    """Each case; the first load of a process, which reads the libraries' sources, is not timed."""
    loader.load(ROOT / "recipes" / "quickstart.yaml")
    adapter_types.all_types()
    return [outcome(seed, folder / "fuzzed.yaml") for seed in seeds]


def summary(found: list[Outcome]) -> dict[str, Any]:
    wrong = [one for one in found if one.said not in ("valid", "refused")]
    return {
        "cases": len(found),
        "valid": sum(one.said == "valid" for one in found),
        "refused, each problem with its place": sum(one.said == "refused" for one in found),
        "slowest seconds": round(max(one.seconds for one in found), 3),
        "wrong": {str(one.seed): one.said for one in wrong},
    }


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested content."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in list(items):
        found.append((content, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def _place(content: Any, draw: random.Random) -> tuple[Any, Any]:
    return draw.choice(_places(content) or [({"": 0}, "")])


def _drop(content: Any, draw: random.Random) -> None:
    held, key = _place(content, draw)
    del held[key]


def _rename(content: Any, draw: random.Random) -> None:
    held, key = _place(content, draw)
    if not isinstance(held, dict):
        return
    name = str(key)
    at = draw.randrange(len(name) + 1)
    letter = draw.choice([*string.ascii_lowercase, "_", "é", "", " ", "."])
    made = draw.choice([name[:at] + letter + name[at + 1 :], name.upper(), name[::-1], draw.choice(WORDS)])
    held[made] = held.pop(key)


def _retype(content: Any, draw: random.Random) -> None:
    held, key = _place(content, draw)
    held[key] = copy.deepcopy(draw.choice(ODD))


def _scale(content: Any, draw: random.Random) -> None:
    """Another number where one stands."""
    numbers = [(held, key) for held, key in _places(content) if type(held[key]) in (int, float)]
    if numbers:
        held, key = draw.choice(numbers)
        held[key] *= draw.choice([0.5, 2, 3, 16, 1000])


def _add(content: Any, draw: random.Random) -> None:
    holders = [held for held, _ in _places(content) if isinstance(held, dict)]
    if holders:
        draw.choice(holders)[draw.choice(_names() + WORDS)] = copy.deepcopy(draw.choice(ODD))


def _move(content: Any, draw: random.Random) -> None:
    held, key = _place(content, draw)
    value = held.pop(key)
    target, _ = _place(content, draw)
    if isinstance(target, dict):
        target[str(key)] = value


def _swap(content: Any, draw: random.Random) -> None:
    """Two sections change names."""
    if len(content) > 1:
        one, other = draw.sample(list(content), 2)
        content[one], content[other] = content[other], content[one]


def _wrap(content: Any, draw: random.Random) -> None:
    held, key = _place(content, draw)
    for _ in range(draw.choice([1, 2, 14, 40])):
        held[key] = {"x": held[key]} if draw.random() < 0.5 else [held[key]]


def _switch(content: Any, draw: random.Random) -> None:
    """Another adapter type, which most keys of the recipe are not meant for."""
    if isinstance(content.get("adapter"), dict):
        content["adapter"]["type"] = draw.choice(sorted(adapter_types.all_types()))


@cache
def _names() -> list[str]:
    """Every key there is."""
    return sorted(key for keys in build.known_keys().values() for key in keys)


def _dump(content: Any, draw: random.Random) -> str:
    return yaml.dump(
        content,
        Dumper=yaml.CSafeDumper,
        sort_keys=draw.random() < 0.2,
        allow_unicode=draw.random() < 0.5,
        default_flow_style=draw.choice([None, None, True, False]),
        width=draw.choice([20, 200]),
    )


def _double_line(text: str, draw: random.Random) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    at = draw.randrange(len(lines))
    return "".join([*lines[: at + 1], *lines[at:]])


def _cut(text: str, draw: random.Random) -> str:
    return text[: draw.randrange(len(text) + 1)]


def _insert(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    odd = [
        "\t",
        "\x00",
        "\ufeff",
        "\u2028",
        ": ",
        "- ",
        "*a",
        "&a ",
        "!!int ",
        "{",
        "]",
        "'",
        '"',
        "|\n",
        "%",
    ]
    return (
        text[:at] + draw.choice([*odd, "\r", "---\n", "...\n", "<<: ", "#", "\ud800", "Ж", "?"]) + text[at:]
    )


def _exchange(text: str, draw: random.Random) -> str:
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text
    found = draw.choice(numbers)
    odd = [
        "9" * 400,
        "9" * 4301,
        "1e999",
        "-1",
        "0",
        "0.0",
        ".nan",
        "1_000",
        "08",
        "0b1",
        "12:30",
        "0x" + "f" * 9999,
    ]
    return text[: found.start()] + draw.choice(odd) + text[found.end() :]


def _override(draw: random.Random) -> str:
    section = draw.choice(["model", "data", "adapter", "speed", "train", "eval", "publish", "modl", ""])
    key = draw.choice([*_names(), *WORDS, "", ".", "name.name"])
    value = draw.choice(ODD)
    text = draw.choice(
        [str(value), yaml.dump(value, Dumper=yaml.CSafeDumper, default_flow_style=True).split("\n")[0]]
    )
    return draw.choice([f"{section}.{key}={text}", f"{section}.{key}", f"{key}={text}"])


_CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (
    _drop, _drop, _rename, _rename, _retype, _retype, _retype, _scale, _scale, _add, _add, _move, _swap,
    _wrap, _switch, _switch,
)  # fmt: skip
_TEXTS: tuple[Callable[[str, random.Random], str], ...] = (_double_line, _cut, _insert, _insert, _exchange)

"""Copies of a run folder, each with one thing in it that is damaged or hostile."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = (
    "environment.json",
    "data_report.json",
    "checks.json",
    "eval.json",
    "metrics.jsonl",
    "recipe.resolved.yaml",
    "validation.jsonl",
    "log.txt",
    "adapter/adapter_config.json",
    "adapter/tokenizer_config.json",
    "checkpoints/contract.json",
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 10**400, -(10**30), 1e308, -1e308, 5e-324, float("nan"), float("inf"),
    float("-inf"), "", "nan", "-inf", "x" * 5000, "\ud800", "\x1b[31m", "\u202e", "a\nerror: b", "../../x",
    "/", "\0", [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["a", 1], "2020-01-01",
    "1e999", "<script>",
)  # fmt: skip


def copied(source: Path, target: Path) -> Path:
    """A copy whose weights are the same files: nothing writes to them in place."""

    def copy(file: str, to: str) -> None:
        os.link(file, to) if file.endswith(".safetensors") else shutil.copy(file, to)

    shutil.copytree(source, target, copy_function=copy)
    return target


def damage(run: Path, seed: int, outside: Path) -> str:
    """Change one thing in a run folder; returns what."""
    chance = random.Random(seed)
    file = run / chance.choice([name for name in FILES if (run / name).exists()])
    kinds = [change_value] * 6 + [truncate, flip, empty, remove, repeat, nest, not_utf8, grow, replace_whole]
    kinds += [link_outside, link_parent, make_fifo, make_folder, dangling]
    kind = chance.choice(kinds)
    kind(file, chance, outside)
    return f"{kind.__name__} {file.relative_to(run)} (seed {seed})"


def change_value(file: Path, chance: random.Random, outside: Path) -> None:
    """One value of a JSON file becomes another one, is renamed or deleted; a word of another file."""
    text = file.read_text()
    if file.suffix not in (".json", ".jsonl"):
        words = text.split(" ")
        words[chance.randrange(len(words))] = str(chance.choice(ODD)).encode("utf-8", "replace").decode()
        file.write_text(" ".join(words))
        return
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    place = chance.randrange(len(lines))
    content = json.loads(lines[place])
    owners = [content, *_containers(content)]
    owner = chance.choice([one for one in owners if one])
    key = chance.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
    how = chance.random()
    if how < 0.75:
        owner[key] = chance.choice(ODD)
    elif how < 0.9 or isinstance(owner, list):
        del owner[key]
    else:
        owner[f"{key}x"] = owner.pop(key)
    lines[place] = json.dumps(content)
    file.write_text("\n".join(lines) + "\n")


def _containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value
    found = [one for one in inner if isinstance(one, (dict, list))]
    return found + [deeper for one in found for deeper in _containers(one)]


def truncate(file: Path, chance: random.Random, outside: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content))])


def flip(file: Path, chance: random.Random, outside: Path) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def empty(file: Path, chance: random.Random, outside: Path) -> None:
    file.write_bytes(b"")


def remove(file: Path, chance: random.Random, outside: Path) -> None:
    file.unlink()


def repeat(file: Path, chance: random.Random, outside: Path) -> None:
    file.write_bytes(file.read_bytes() * chance.choice((2, 3)))


def nest(file: Path, chance: random.Random, outside: Path) -> None:
    depth, (left, right) = chance.choice((30, 900, 100_000)), chance.choice(("[]", ('{"a":', "}")))
    file.write_text(left * depth + ("1" if left != "[" else "") + right * depth)


def not_utf8(file: Path, chance: random.Random, outside: Path) -> None:
    content = file.read_bytes()
    at = chance.randrange(len(content))
    file.write_bytes(content[:at] + b"\xff\xfe\x80" + content[at:])


def grow(file: Path, chance: random.Random, outside: Path) -> None:
    """A sparse file of 20 GB."""
    with file.open("r+b") as handle:
        handle.truncate(20 * 2**30)


def replace_whole(file: Path, chance: random.Random, outside: Path) -> None:
    file.write_text(json.dumps(chance.choice(ODD)))


def link_outside(file: Path, chance: random.Random, outside: Path) -> None:
    shutil.copy(file, outside / file.name)
    file.unlink()
    file.symlink_to(outside / file.name)


def link_parent(file: Path, chance: random.Random, outside: Path) -> None:
    """Its folder, or the file itself where it lies at the top, becomes a link."""
    run = file.parent if (file.parent / "recipe.resolved.yaml").exists() else file.parent.parent
    name = chance.choice([entry.name for entry in run.iterdir() if entry.is_dir()])
    shutil.move(run / name, outside / name)
    (run / name).symlink_to(outside / name)


def make_fifo(file: Path, chance: random.Random, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_folder(file: Path, chance: random.Random, outside: Path) -> None:
    file.unlink()
    file.mkdir()


def dangling(file: Path, chance: random.Random, outside: Path) -> None:
    """A name that finetune writes leads to a file that is not there yet."""
    name = chance.choice(
        ("report.html", "eval.json", "merged", "eval.other.json", "merge.json", "publish.json")
    )
    target = file.parent / name
    if target.is_dir() and not target.is_symlink():
        return
    target.unlink(missing_ok=True)
    target.symlink_to(outside / "made")


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files: Callable[[str], Any] = folder.rglob
    return {str(path.relative_to(folder)): path.read_bytes()[:1000] for path in files("*") if path.is_file()}

"""Copies of a run folder, each with one thing in it that is damaged or hostile."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 10**400, -(10**30), 1e308, -1e308, 5e-324, float("nan"), float("inf"),
    float("-inf"), "", "nan", "-inf", "x" * 5000, "\ud800", "\x1b[31m", "\u202e", "a\nerror: b", "../../x",
    "/", "\0", "a\0b", [], {}, [[]], [None], [{}], {"": None}, {"a": {"b": []}}, ["a", 1], "2020-01-01",
    "1e999", "<script>", [float("nan")], {"nan": float("inf")}, "sd\u2028x", "~", "{{ 1/0 }}", 0.5, [1, 2],
)  # fmt: skip
WORDS = ("null", "true", "-1", ".nan", "1e999", "9" * 400, "[]", "{}", "'x", '"', "*a", "&a", "!!x y", "{",
         "[", "\t", "- a", "? b", "%c", "@d", "`", "#", ":", "x: y: z", "\\ud800", "---", "...")  # fmt: skip
NAMES = ("report.html", "eval.json", "merged", "eval.other.json", "merge.json", "publish.json", "log.txt")


def copied(source: Path, target: Path) -> Path:
    """A copy of a run folder. No damage changes weights, so both folders name the same files of weights."""
    shutil.copytree(source, target, copy_function=_copy)
    return target


def _copy(source: str, target: str) -> None:
    (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)


def texts_of(run: Path) -> list[Path]:
    """Every file but the weights."""
    files = (path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in files if path.suffix != ".safetensors")


def damage(run: Path, seed: int, outside: Path) -> str:
    """Change one thing in a run folder; returns what."""
    chance = random.Random(seed)
    file = chance.choice(texts_of(run))
    kind = chance.choice([change_value] * 14 + [change_bytes] * 6 + [replace_file] * 4)
    name = str(file.relative_to(run))
    return f"seed {seed}: {name}: {kind(file, run, chance, outside)}"


def change_value(file: Path, run: Path, chance: random.Random, outside: Path) -> str:
    """One value of a JSON file becomes another one, is renamed or deleted; a word of another file."""
    text = file.read_text()
    if file.suffix not in (".json", ".jsonl"):
        return _change_word(file, text, chance)
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    place = chance.randrange(len(lines))
    content = json.loads(lines[place])
    owner = chance.choice([one for one in (content, *_containers(content)) if one])
    key = chance.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
    how = chance.random()
    said = f"{key!r} "
    if how < 0.75:
        owner[key] = value = chance.choice(ODD)
        said += f"becomes {str(value)[:30]!r}"
    elif how < 0.9 or isinstance(owner, list):
        del owner[key]
        said += "is deleted"
    elif how < 0.95:
        owner[f"{key}x"] = owner.pop(key)
        said += "is renamed"
    else:
        lines[place] = _twice(content, owner, str(key), chance.choice(ODD))
        file.write_text("\n".join(lines) + "\n")
        return said + "is there twice"
    lines[place] = json.dumps(content)
    file.write_text("\n".join(lines) + "\n")
    return said


def _twice(content: Any, owner: dict[str, Any], key: str, value: Any) -> str:
    """JSON in which an object has a key twice."""
    owner["\0mark"] = 0
    again = f"{json.dumps(key)}: {json.dumps(value)}"
    return json.dumps(content).replace('"\\u0000mark": 0', again)


def _change_word(file: Path, text: str, chance: random.Random) -> str:
    words = text.split(" ")
    place = chance.randrange(len(words))
    words[place] = chance.choice([*WORDS, *map(str, ODD)]).encode("utf-8", "replace").decode()
    file.write_text(" ".join(words))
    return f"word {place} becomes {words[place][:30]!r}"


def _containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [one for one in inner if isinstance(one, (dict, list))]
    return found + [deeper for one in found for deeper in _containers(one)]


def change_bytes(file: Path, run: Path, chance: random.Random, outside: Path) -> str:
    """Damage that looks at no content: a cut, a flipped bit, noise, another encoding."""
    content = file.read_bytes() or b"?"
    at = chance.randrange(len(content))
    flipped = bytearray(content)
    flipped[at] ^= 1 << chance.randrange(8)
    depth, (left, right) = chance.choice((30, 900, 100_000)), chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    damaged = {
        "cut": content[:at],
        "flipped": bytes(flipped),
        "empty": b"",
        "blank": b" \n",
        "zeros": b"\0" * len(content),
        "noise": chance.randbytes(min(len(content), 5000)),
        "twice": content * 2,
        "nested": left * depth + b"1" + right * depth,
        "not UTF-8": content[:at] + b"\xff\xfe\x80" + content[at:],
        "UTF-16": content.decode().encode("utf-16"),
        "BOM": b"\xef\xbb\xbf" + content,
        "CRLF": content.replace(b"\n", b"\r\n"),
        "one value": json.dumps(chance.choice(ODD)).encode(),
    }
    how = chance.choice(list(damaged))
    file.write_bytes(damaged[how])
    return f"{how} at {at}"


def replace_file(file: Path, run: Path, chance: random.Random, outside: Path) -> str:
    """Something else replaces a file."""
    how = chance.choice((_remove, _grow, _link_outside, _link_parent, _make_fifo, _make_folder, _dangle))
    how(file, run, chance, outside)
    return how.__name__


def _remove(file: Path, run: Path, chance: random.Random, outside: Path) -> None:
    file.unlink()


def _grow(file: Path, run: Path, chance: random.Random, outside: Path) -> None:
    """A sparse file of 20 GB."""
    with file.open("r+b") as handle:
        handle.truncate(20 * 2**30)


def _link_outside(file: Path, run: Path, chance: random.Random, outside: Path) -> None:
    shutil.copy(file, outside / file.name)
    file.unlink()
    file.symlink_to(outside / file.name)


def _link_parent(file: Path, run: Path, chance: random.Random, outside: Path) -> None:
    """A folder of the run becomes a link."""
    name = chance.choice(sorted(entry.name for entry in run.iterdir() if entry.is_dir()))
    shutil.move(run / name, outside / name)
    (run / name).symlink_to(outside / name)


def _make_fifo(file: Path, run: Path, chance: random.Random, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _make_folder(file: Path, run: Path, chance: random.Random, outside: Path) -> None:
    file.unlink()
    file.mkdir()


def _dangle(file: Path, run: Path, chance: random.Random, outside: Path) -> None:
    """A name that finetune writes leads to a file that is not there yet."""
    target = run / chance.choice(NAMES)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to(outside / "made")


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files: Callable[[str], Any] = folder.rglob
    return {str(path.relative_to(folder)): path.read_bytes()[:1000] for path in files("*") if path.is_file()}

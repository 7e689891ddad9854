"""Files that would hang a command or fill memory: each is answered with an error, soon."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import os
import shutil
import socket
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from finetune.core import errors
from finetune.core.errors import UserError
from finetune.hardware import detection
from finetune.models import checkpoint_headers
from finetune.recipe import loader
from finetune.run_folder import run_folder
from support.paths import DATA, MODEL, QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB = 2**20


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # a socket's path has at most 107 bytes
        bound.bind(path.name)
        os.fchdir(here)
        os.close(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 * 2**30)


KINDS = (pipe, bound_socket, device, sparse)


def each_with_the_next_kind(files: Sequence[Any]) -> list[Any]:
    """Every file with every kind; `make test` has each file with one kind, and each kind."""
    cells = [(make, file) for make in KINDS for file in files]
    kept = [cell for cell in cells if (KINDS.index(cell[0]) + files.index(cell[1])) % len(KINDS) == 0]
    return soak_except(kept, cells)


OF_A_RECIPE = [
    *((f"a{suffix}", "data.name={path}") for suffix in (".jsonl", ".json", ".csv", ".tar", ".txt")),
    *((f"a{suffix}", "data.name={path}") for suffix in (".parquet", ".arrow")),
    ("a.jsonl", "data.validation={path}"),
    ("a.txt", "eval.forgetting={path}"),
    ("a.yaml", "eval.tasks=[{path}]"),
    ("a.jinja", "data.chat_template={path}"),
    ("recipe.yaml", ""),
]
OF_A_MODEL = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "additional_chat_templates/tool_use.jinja",
]


@pytest.mark.parametrize(("make", "file"), each_with_the_next_kind(OF_A_RECIPE))
def test_a_file_of_a_recipe_that_is_no_regular_file_is_refused(
    make: Callable[[Path], None], file: tuple[str, str], tmp_path, commands
) -> None:
    name, words = file
    make(path := tmp_path / name)
    recipe, *overrides = [str(path)] if not words else [str(QUICKSTART), words.format(path=path)]
    ended = commands.run("check", recipe, *overrides)
    assert not ended.wrong and ended.code == 2, ended


@pytest.mark.parametrize(("make", "name"), each_with_the_next_kind(OF_A_MODEL))
def test_a_file_of_a_model_that_is_no_regular_file_is_refused(
    make: Callable[[Path], None], name: str, tmp_path, commands
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    make(folder / name)
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2, ended
    assert name in ended.said


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_an_adapter_that_is_no_regular_file_is_refused(
    make: Callable[[Path], None], name: str, tmp_path, commands
) -> None:
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": str(MODEL)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / name).unlink()
    make(tmp_path / name)
    ended = commands.run("check", str(QUICKSTART), f"adapter.init_from={tmp_path}")
    assert not ended.wrong and ended.code == 2, ended


def long_line(path: Path) -> None:
    line = b'{"messages": [{"role": "user", "content": "' + b"a" * (200 * MIB) + b'"}]}\n'
    path.write_bytes(line)


def many_brackets(path: Path) -> None:
    path.write_bytes(b"[" * (60 * MIB))


def deep_line(path: Path) -> None:
    levels = (300, 480, 600, 800, 900, 960, 980, 990, 1000, 2000, 100_000)
    texts = (b'{"messages":' + b"[" * count + b"1" + b"]" * count + b"}" for count in levels)
    more = (b'{"messages":' + b'{"a":' * count + b"1" + b"}" * count + b"}" for count in levels)
    path.write_bytes(b"\n".join([*texts, *more]) + b"\n")


def empty_lists(path: Path) -> None:
    path.write_bytes(b"[" + b"[]," * (30 * MIB) + b"[]]")


def csv_line(path: Path) -> None:
    path.write_bytes(b"text\n" + b"a" * (200 * MIB))


def csv_quote(path: Path) -> None:
    path.write_bytes(b'text\n"' + b"aaaaaaaaa\n" * (20 * MIB))


def csv_header(path: Path) -> None:
    path.write_bytes(b"a," * (100 * MIB))


def text(path: Path) -> None:
    path.write_bytes(b"word " * (40 * MIB))


def archive(path: Path, compress: Callable[[bytes], bytes], size: int, times: int) -> None:
    """A tar with one member of `size` zeros, as so many concatenated compressed streams."""
    header = tarfile.TarInfo("a.txt")
    header.size = size * times
    block = compress(bytes(size))
    with path.open("wb") as file:
        file.write(compress(header.tobuf()))
        for _ in range(times):
            file.write(block)


def tar_gz(path: Path) -> None:
    archive(path, gzip.compress, 256 * MIB, 16)


def tar_bz2(path: Path) -> None:
    archive(path, bz2.compress, 64 * MIB, 64)


def tar_xz(path: Path) -> None:
    archive(path, lzma.compress, 64 * MIB, 64)


def tar_xz_memory(path: Path) -> None:
    """A small archive whose decoder would reserve 4 GiB."""
    with tarfile.open(path, "w:xz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    content = bytearray(path.read_bytes())
    header = content[12 : 12 + 4 * (content[12] + 1)]
    header[header.index(b"\x21\x01") + 2] = 39  # the size of the dictionary
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    content[12 : 12 + len(header)] = header
    path.write_bytes(content)


def tar_header(path: Path) -> None:
    """A header of the pax format that would be read whole."""
    header = tarfile.TarInfo("a")
    header.type, header.size = tarfile.XHDTYPE, 4 * 2**30
    block = gzip.compress(bytes(256 * MIB))
    path.write_bytes(gzip.compress(header.tobuf()) + block * 16)


def tar_folders(path: Path) -> None:
    """Entries without content, which compress to nothing."""
    header = tarfile.TarInfo("a")
    header.type = tarfile.DIRTYPE
    path.write_bytes(gzip.compress(header.tobuf() * (256 * MIB // 512)) * 4)


def tar_headers(path: Path) -> None:
    """Headers of headers, which tarfile reads by calling itself."""
    header = tarfile.TarInfo("a")
    header.type, header.size = tarfile.XHDTYPE, 0
    path.write_bytes(header.tobuf() * 100_000)


def tar_digits(path: Path) -> None:
    """A pax header in which older releases of Python search for minutes."""
    header = tarfile.TarInfo("a")
    header.type, header.size = tarfile.XHDTYPE, 300_032
    path.write_bytes(gzip.compress(header.tobuf() + b"1" * 300_032))


def tar_map(path: Path) -> None:
    """A sparse member whose map has one number in place of two."""
    header = tarfile.TarInfo("a.txt")
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.txt"}
    header.pax_headers, header.size = {**pax, "GNU.sparse.realsize": "9"}, 512
    path.write_bytes(header.tobuf(tarfile.PAX_FORMAT) + b"99\n".ljust(512, b"\0") + bytes(1024))


def tar_name(path: Path) -> None:
    """A name in Latin-1."""
    header = tarfile.TarInfo(b"caf\xe9.txt".decode("latin-1"))
    header.size = 1
    path.write_bytes(header.tobuf(tarfile.USTAR_FORMAT, "latin-1") + b"a".ljust(512, b"\0") + bytes(1024))


def tar_sparse(path: Path) -> None:
    """A member with a hole of 8 GiB."""
    header = tarfile.TarInfo("a.txt")
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.txt"}
    header.pax_headers = {**pax, "GNU.sparse.realsize": str(8 * 2**30)}
    header.size = 512
    content = b"1\n" + str(8 * 2**30 - 1).encode() + b"\n1\n"
    path.write_bytes(header.tobuf(tarfile.PAX_FORMAT) + content.ljust(512, b"\0") + bytes(1024))


def parquet_dictionary(path: Path) -> None:
    """A text of 40 MB that stands once in the file and in each of a thousand rows."""
    import pyarrow as pa
    from pyarrow import parquet

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["a" * 40_000_000])
    parquet.write_table(pa.table({"text": values}), path, compression="zstd")


def parquet_nested(path: Path) -> None:
    """The same in the messages of a chat."""
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 40_000, pa.int32()), ["a" * 40_000_000])
    items = pa.StructArray.from_arrays([text], ["content"])
    messages = pa.ListArray.from_arrays(pa.array(range(0, 40_001, 40), pa.int32()), items)
    parquet.write_table(pa.table({"messages": messages}), path, compression="zstd")


def parquet_zeros(path: Path) -> None:
    """A list of fifty million numbers, of which a run of zeros is left."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    values = pa.array(np.zeros(50_000_000, dtype=np.int8))
    column = pa.ListArray.from_arrays(pa.array([0, 50_000_000], pa.int32()), values)
    parquet.write_table(pa.table({"text": column}), path, compression="zstd")


def parquet_text(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(
        pa.table({"text": ["a" * 200_000_000]}), path, compression="zstd", use_dictionary=False
    )


def parquet_lying(path: Path) -> None:
    """Three texts of 300 MB, of which the footer says that they have 100 bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.array(["a" * 300_000_000])
    parquet.write_table(
        pa.table({"text": text, "a": text, "b": text}), path, compression="zstd", use_dictionary=False
    )
    group = parquet.ParquetFile(path).metadata.row_group(0)
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for size in (group.column(0).total_uncompressed_size, group.total_byte_size):
        number = varint(2 * size)
        said = bytes([0x80 | (200 & 0x7F), 0x81]).ljust(len(number) - 1, b"\x80") + b"\0"
        content = content[:start] + content[start:].replace(number, said)
    path.write_bytes(content)
    assert parquet.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size == 100


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def arrow_zstd(path: Path) -> None:
    """A compressed batch that expands to 600 MB."""
    import pyarrow as pa

    table = pa.table({"text": pa.array(["a" * 30_000_000] * 20, pa.large_string())})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table)


def arrow_dictionary(path: Path) -> None:
    """A text of 40 MB that stands once in the file and in each of a million rows."""
    import pyarrow as pa

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), ["a" * 40_000_000])
    table = pa.table({"text": values})
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table)


def write_arrow(path: Path, column: Any) -> None:
    import pyarrow as pa

    batch = pa.record_batch([column], names=["text"])
    with pa.ipc.new_file(path, batch.schema) as file:
        file.write_batch(batch)


def arrow_runs(path: Path) -> None:
    import pyarrow as pa

    runs = pa.RunEndEncodedArray.from_arrays(pa.array([100_000], pa.int32()), pa.array(["a" * 30_000_000]))
    write_arrow(path, runs)


def arrow_views(path: Path) -> None:
    """A hundred thousand rows that all show one text."""
    import numpy as np
    import pyarrow as pa

    views = np.zeros((100_000, 4), dtype=np.int32)
    views[:, 0], views[:, 1] = 30_000_000, int.from_bytes(b"aaaa", "little")
    buffers = [None, pa.py_buffer(views), pa.py_buffer(b"a" * 30_000_000)]
    write_arrow(path, pa.Array.from_buffers(pa.string_view(), len(views), buffers))


def arrow_list_views(path: Path) -> None:
    import numpy as np
    import pyarrow as pa

    starts, sizes = pa.array([0] * 100_000, pa.int32()), pa.array([10**6] * 100_000, pa.int32())
    write_arrow(path, pa.ListViewArray.from_arrays(starts, sizes, pa.array(np.zeros(10**6, np.int8))))


def arrow_union(path: Path) -> None:
    import pyarrow as pa

    kinds, starts = pa.array([0] * 100_000, pa.int8()), pa.array([0] * 100_000, pa.int32())
    write_arrow(path, pa.UnionArray.from_dense(kinds, starts, [pa.array(["a" * 30_000_000])]))


def arrow_offsets(path: Path) -> None:
    """Texts that begin after their end."""
    import numpy as np
    import pyarrow as pa

    starts = np.zeros(100_001, dtype=np.int32)
    starts[1::2] = 30_000_000
    buffers = [None, pa.py_buffer(starts), pa.py_buffer(b"a" * 30_000_000)]
    write_arrow(path, pa.Array.from_buffers(pa.string(), 100_000, buffers))


def arrow_list_of_nulls(path: Path) -> None:
    import numpy as np
    import pyarrow as pa

    starts = pa.py_buffer(np.array([0, 500_000_000], dtype=np.int32))
    column = pa.Array.from_buffers(pa.list_(pa.null()), 1, [None, starts], children=[pa.nulls(500_000_000)])
    write_arrow(path, column)


def arrow_nulls(path: Path) -> None:
    """A hundred million rows without a byte."""
    import pyarrow as pa

    batch = pa.record_batch([pa.nulls(10**8)], names=["text"])
    with pa.ipc.new_file(path, batch.schema) as file:
        file.write_batch(batch)


BOMBS = [
    ("a.jsonl", long_line),
    ("a.json", long_line),
    ("a.jsonl", many_brackets),
    ("a.json", many_brackets),
    ("a.jsonl", deep_line),
    ("a.json", deep_line),
    ("a.json", empty_lists),
    ("a.csv", csv_line),
    ("a.csv", csv_quote),
    ("a.csv", csv_header),
    ("a.txt", text),
    ("a.tar", tar_gz),
    ("a.tar", tar_bz2),
    ("a.tar", tar_xz),
    ("a.tar", tar_header),
    ("a.tar", tar_folders),
    ("a.tar", tar_headers),
    ("a.tar", tar_sparse),
    ("a.tar", tar_digits),
    ("a.tar", tar_map),
    ("a.tar", tar_name),
    ("a.parquet", parquet_dictionary),
    ("a.parquet", parquet_nested),
    ("a.parquet", parquet_zeros),
    ("a.parquet", parquet_text),
    ("a.arrow", arrow_zstd),
    ("a.arrow", arrow_dictionary),
    ("a.arrow", arrow_nulls),
    ("a.tar", tar_xz_memory),
    ("a.parquet", parquet_lying),
    ("a.arrow", arrow_runs),
    ("a.arrow", arrow_views),
    ("a.arrow", arrow_list_views),
    ("a.arrow", arrow_union),
    ("a.arrow", arrow_offsets),
    ("a.arrow", arrow_list_of_nulls),
]


IN_CI = [
    *BOMBS[:1],
    ("a.json", deep_line),
    ("a.csv", csv_quote),
    ("a.tar", tar_gz),
    ("a.arrow", arrow_zstd),
    ("a.arrow", arrow_views),
    ("a.arrow", arrow_offsets),
    ("a.arrow", arrow_list_of_nulls),
    ("a.tar", tar_xz_memory),
]


@pytest.mark.parametrize(("name", "make"), soak_except([*IN_CI, ("a.parquet", parquet_dictionary)], BOMBS))
def test_data_that_would_fill_memory_is_refused(name: str, make: Callable, tmp_path, commands) -> None:
    make(tmp_path / name)
    ended = commands.run("check", str(QUICKSTART), f"data.name={tmp_path / name}")
    assert not ended.wrong and ended.code == 2, ended


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("hidden_size", {"hidden_size": -5}),
    ("hidden_size", {"hidden_size": 0}),
    ("intermediate_size", {"intermediate_size": 10**12}),
    ("num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("num_hidden_layers", {"num_hidden_layers": -1}),
    ("num_attention_heads", {"num_attention_heads": 10**9}),
    ("vocab_size", {"vocab_size": 10**12}),
    ("head_dim", {"head_dim": 10**12}),
    ("max_position_embeddings", {"max_position_embeddings": 10**18}),
    ("n_layer", {"model_type": "gpt2", "n_layer": 10**9, "architectures": ["GPT2LMHeadModel"]}),
    ("num_local_experts", {"model_type": "mixtral", "num_local_experts": 10**9}),
    ("num_hidden_layers", {"text_config": {"num_hidden_layers": 10**9}}),
]


@pytest.mark.parametrize(("name", "entries"), SIZES, ids=str)
def test_config_with_a_size_that_no_model_has_is_refused(
    name: str, entries: dict[str, Any], tmp_path, commands
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2, ended
    assert "a size that no model has" in ended.said and f"{name}: " in ended.said


VALUES: list[dict[str, Any]] = [
    {"rms_norm_eps": 0},
    {"rms_norm_eps": -1.0},
    {"attention_dropout": math.nan},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
    {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 0},
    {"layer_types": ["sliding_attention"] * 6},
    {"layer_types": ["sliding_attention"] * 6, "sliding_window": -4},
    {"num_hidden_layers": 7},  # the files lack weights
    {"tie_word_embeddings": False},  # the same
]


@pytest.mark.parametrize("entries", VALUES, ids=str)
def test_config_that_fails_in_training_is_refused_by_check(
    entries: dict[str, Any], tmp_path, commands
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2, ended


def split_weights(folder: Path, *, twice: bool) -> None:
    """Split the weights of a model into two files, which may both hold the first tensor."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    first, second = names[:9], names[9:]
    save_file({name: tensors[name] for name in first}, folder / "a.safetensors")
    more = {names[0]: tensors[names[0]] * 2} if twice else {}
    save_file({name: tensors[name] for name in second} | more, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: "a.safetensors" if name in first else "b.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_tensor_that_two_weight_files_hold_is_refused(tmp_path, commands) -> None:
    for twice in (False, True):
        folder = Path(shutil.copytree(MODEL, tmp_path / f"model-{twice}"))
        split_weights(folder, twice=twice)
        ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
        assert not ended.wrong and ended.code == (2 if twice else 0), ended
        assert ("two weight files hold the same tensor" in ended.said) == twice


def test_weight_files_with_many_tensors_together_are_refused(tmp_path, commands) -> None:
    """Each header is below the limit of one file."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    index = dict.fromkeys(load_file(folder / "model.safetensors"), "own.safetensors")
    for shard in range(8):
        entries = {
            f"{shard}.{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            for number in range(200_000)
        }
        header = json.dumps(entries, separators=(",", ":")).encode()
        (folder / f"{shard}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        index[f"{shard}.0"] = f"{shard}.safetensors"
    (folder / "model.safetensors").rename(folder / "own.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert ended.code == 2 and "too many tensors together" in ended.said and ended.bytes < 2 * 2**30, ended


def test_weights_under_other_names_are_refused(tmp_path, commands) -> None:
    """The names of the base model, without `model.`, are accepted."""
    for prefix, code in (("", 0), ("transformer.", 2)):
        folder = Path(shutil.copytree(MODEL, tmp_path / f"model-{prefix}"))
        tensors = load_file(folder / "model.safetensors")
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors")
        ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
        assert not ended.wrong and ended.code == code, ended


MANY_ADDED = ["tokenizer.json", "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.mark.parametrize("name", MANY_ADDED)
def test_tokenizer_with_a_million_added_tokens_is_refused(name: str, tmp_path, commands) -> None:
    """Written so short that the file is not too large."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    count = 300_000 if name == "tokenizer.json" else 600_000
    path = folder / name
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if name == "tokenizer.json":
        content["added_tokens"] += [{"id": 10**4 + number, "content": str(number)} for number in range(count)]
    elif name == "special_tokens_map.json":
        content["extra_special_tokens"] = [str(number) for number in range(count // 3)]
    elif name == "added_tokens.json":
        content = {str(number): number for number in range(count)}
    else:
        content["added_tokens_decoder"] = {str(number): "" for number in range(count)}
    path.write_text(json.dumps(content, separators=(",", ":")))
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2, ended
    assert "too many added tokens" in ended.said


NAME = "model.embed_tokens.weight"
HEADERS: list[tuple[dict[str, Any], int]] = [
    ({"shape": [2**62, 2**62]}, 16),
    ({"shape": [2**32, 2**32]}, 0),
    ({"shape": [-1, -4]}, 16),
    ({"shape": [5]}, 16),
    ({"shape": [1] * 10**6}, 4),
    ({"shape": ["4"]}, 16),
    ({"dtype": "Q9"}, 16),
    ({"data_offsets": [0, 2**64]}, 16),
    ({"data_offsets": [8, 0]}, 0),
]


@pytest.mark.parametrize(("entry", "size"), HEADERS, ids=lambda value: str(value)[:60])
def test_safetensors_with_a_lying_header_are_refused(
    entry: dict[str, Any], size: int, tmp_path, commands
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    whole = {NAME: {"dtype": "F32", "shape": [4], "data_offsets": [0, size], **entry}}
    header = json.dumps(whole).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    (folder / "model.safetensors").write_bytes(content)
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2, ended
    assert "is not a safetensors file" in ended.said


MANY_VALUES = {
    "model.safetensors": b'{"__metadata__":{},"x":',
    "tokenizer.json": b'{"added_tokens":',
    "model.safetensors.index.json": b'{"weight_map":{},"x":',
}


@pytest.mark.parametrize("name", MANY_VALUES)
def test_json_of_too_many_values_is_refused(name: str, tmp_path, commands) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    content = MANY_VALUES[name] + b"[" + b"[]," * 15_000_000 + b"[]]}"
    size = len(content).to_bytes(8, "little") if name == "model.safetensors" else b""
    (folder / name).write_bytes(size + content)
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2 and "values" in ended.said, ended


def many_entries(folder: Path) -> None:
    for number in range(12_000):
        (folder / f"x{number}").touch()


def many_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for number in range(3):
        (folder / "additional_chat_templates" / f"t{number}.jinja").write_bytes(b"a" * 6_000_000)


def many_names(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"a{number}": 512 + number for number in range(1_100_000)}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def many_files(folder: Path) -> None:
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    named = {f"t{number}": f"a{number}.safetensors" for number in range(20_000)}
    index = json.dumps({"metadata": {}, "weight_map": named})
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize("make", (many_entries, many_templates, many_names, many_files))
def test_folder_of_a_model_with_too_much_is_refused(make: Callable, tmp_path, commands) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    make(folder)
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2 and "too " in ended.said, ended


PLAIN = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        f'{{"a": {json.dumps(PLAIN)}, "b": {json.dumps(PLAIN)}}}',
        f'{{"a": {json.dumps(PLAIN | {"data_offsets": [16, 32]})}}}',
        f'{{"a": {json.dumps(PLAIN)}, "a": {json.dumps(PLAIN | {"data_offsets": [16, 32]})}}}',
        f'{{"a": {json.dumps(PLAIN)}, "__metadata__": {{"format": 1}}}}',
        f'{{"\\ud800": {json.dumps(PLAIN)}}}',
        f'{{"a": {json.dumps(PLAIN | {"data_offsets": [0.0, 16.0]})}}}',
        f'{{"a": {json.dumps(PLAIN | {"shape": [4, True]})}}}',
        f'\ufeff{{"a": {json.dumps(PLAIN)}}}',
        f'{{"__metadata__": {{}}, "a": {json.dumps(PLAIN)}, "__metadata__": {{}}}}',
    ],
    ids=[
        "overlap",
        "gap",
        "same name",
        "metadata",
        "surrogate",
        "decimal numbers",
        "a truth as a size",
        "mark",
        "two metadata",
    ],
)
def test_header_that_the_safetensors_library_refuses_is_refused(header: str, tmp_path) -> None:
    """`check` reads headers itself. Otherwise it would accept weights that the run can't load."""
    path = tmp_path / "model.safetensors"
    size = 32 if "32]" in header else 16
    content = header.encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(size))
    with pytest.raises(SafetensorError):
        safe_open(path, "np").keys()
    with pytest.raises(errors.UserError, match="is not a safetensors file"):
        checkpoint_headers.tensors(tmp_path)


@pytest.mark.parametrize("length", [10**9, 2**63, 2**64 - 1])
def test_safetensors_whose_header_is_longer_than_the_file_are_refused(
    length: int, tmp_path, commands
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2 and "its header would be" in ended.said, ended


def recipe_with(section: str, entries: dict[str, Any], folder: Path) -> str:
    """A recipe with odd entries in one section."""
    recipe = yaml.safe_load(QUICKSTART.read_text())
    recipe["model"] = {"name": str(MODEL)}
    recipe["data"] = {
        **recipe["data"],
        "name": str(MODEL.parent / "data" / "train.jsonl"),
        "validation": None,
    }
    recipe[section] = {**recipe.get(section, {}), **entries}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


LONG = "k" * 200_000
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("train", {LONG: 1}),
    ("train", {f"k{number}": 1 for number in range(4000)}),
    ("adapter", {LONG: 1}),
    ("adapter", {"target_modules": [LONG]}),
    ("adapter", {"target_modules": [f"q{number}" for number in range(900)]}),
    ("adapter", {"rank_pattern": {f"q{number}": 4 for number in range(900)}}),
    *(
        ("adapter", {key: [f"q{number}" for number in range(4000)]})
        for key in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")
    ),
    ("adapter", {"rank_pattern": {f"q{number}": 4 for number in range(4000)}}),
    ("adapter", {"layer_replication": [[0, 10**9]]}),
    ("eval", {"tasks": [LONG]}),
    ("eval", {"tasks": [f"a{number}" for number in range(4000)]}),
    ("eval", {"tasks": [f"./a{number}.yaml" for number in range(4000)]}),
    ("data", {"name": [{"name": f"a{number}.jsonl"} for number in range(2000)]}),
    ("data", {"name": LONG}),
    ("data", {"name": "[a]" * 60_000}),
    ("data", {"name": "*/" * 60_000}),
    ("data", {"name": "/*/*/*/*/*/*/*/*/*/a.jsonl"}),
    ("data", {"name": "/**/*.jsonl"}),
    ("data", {"name": "/"}),
    ("data", {"name": "a\0b.jsonl"}),
    ("model", {"name": LONG}),
    ("model", {"name": "a\0b"}),
    ("data", {"name": [str(DATA / "train.jsonl")] * 4_000}),
]
LARGE_IN_CI = [LARGE[-1], LARGE[0], LARGE[4], LARGE[6], LARGE[17], LARGE[18], LARGE[19], LARGE[23]]


@pytest.mark.parametrize(
    ("section", "entries"), soak_except(LARGE_IN_CI, LARGE), ids=lambda one: str(one)[:40]
)
def test_recipe_with_long_names_or_many_entries_is_refused(
    section: str, entries: dict[str, Any], tmp_path, commands
) -> None:
    ended = commands.run("check", recipe_with(section, entries, tmp_path))
    assert not ended.wrong and ended.code == 2, ended
    assert ended.said.count("error:") <= 2 * errors.MOST_PROBLEMS


MANY: list[tuple[str, str, Any]] = [
    ("model", "add_tokens", [f"<{number}>" for number in range(15_000)]),
    ("data", "name", ["a/b"] * 15_000),
    ("data", "role_map", {f"k{number}": 0 for number in range(15_000)}),
]


@pytest.mark.parametrize(("section", "key", "value"), MANY, ids=lambda one: str(one)[:20])
def test_recipe_with_more_values_than_any_has_is_refused(
    section: str, key: str, value: Any, tmp_path, commands
) -> None:
    ended = commands.run("check", recipe_with(section, {key: value}, tmp_path))
    assert not ended.wrong and ended.code == 2 and "the YAML has too many values" in ended.said, ended


def test_error_with_many_problems_shows_some_and_counts_the_others() -> None:
    said = str(errors.UserError(*(errors.Problem(str(number)) for number in range(350))))
    assert said.count("error:") == errors.MOST_PROBLEMS + 1 and "250 more problems are not shown" in said


@pytest.mark.parametrize("name", ["/*/*/*/*/*/*/*/*/*/a.jsonl", "/**/*.jsonl"])
def test_pattern_of_a_recipe_in_a_run_folder_looks_at_few_files(name: str) -> None:
    recipe = loader.load(QUICKSTART, [f"data.name={name}", f"model.name={MODEL}"])
    with pytest.raises(errors.UserError):
        run_folder.local_paths(recipe)


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
@pytest.mark.parametrize("value", [10**9, 10**30])
def test_huge_numbers_of_an_adapter_end_soon(key: str, value: int, tmp_path, commands) -> None:
    """A rank of a billion is valid: `plan` says that no machine has the memory."""
    ended = commands.run("check", recipe_with("adapter", {key: value}, tmp_path))
    assert not ended.wrong, ended


@pytest.mark.parametrize("key", ["train.output_dir", "data.cache_dir"])
@pytest.mark.parametrize("path", ["/proc/x", "/proc/self/x", "/sys/kernel/x", "/sys", "/dev/null/x"])
def test_folder_that_nobody_can_make_is_refused(key: str, path: str, commands) -> None:
    ended = commands.run("check", str(QUICKSTART), f"{key}={path}")
    assert not ended.wrong and ended.code in (2, 3) and f"error: {key}" in ended.said, ended


def test_chat_template_that_is_another_file_is_refused_without_its_text(tmp_path, commands) -> None:
    path = tmp_path / ".netrc"
    path.write_text("machine example.org login me password in-this-file\n")
    ended = commands.run("check", str(QUICKSTART), f"data.chat_template={path}")
    assert not ended.wrong and ended.code == 2 and "not a Jinja template" in ended.said, ended
    assert "in-this-file" not in ended.said


OF_KERNEL = "/proc/kmsg"  # a regular file to `stat`, from which a read may wait without an end


@pytest.mark.skipif(not Path(OF_KERNEL).exists(), reason="Linux alone has it")
@pytest.mark.parametrize("words", [[OF_KERNEL], [str(QUICKSTART), f"data.chat_template={OF_KERNEL}"]])
def test_file_of_the_kernel_is_refused(words: list[str], commands) -> None:
    ended = commands.run("check", *words)
    assert not ended.wrong and ended.code == 2 and "a file of the kernel" in ended.said, ended


@pytest.mark.parametrize("suffix", ["jsonl", "yaml", "jinja"])
def test_link_to_a_file_of_the_kernel_is_refused(suffix: str, tmp_path, commands) -> None:
    (tmp_path / f"a.{suffix}").symlink_to("/proc/self/environ")
    keys = {"jsonl": "data.name={}", "yaml": "eval.tasks=[{}]", "jinja": "data.chat_template={}"}
    ended = commands.run("check", str(QUICKSTART), keys[suffix].format(tmp_path / f"a.{suffix}"))
    assert not ended.wrong and ended.code == 2 and "a file of the kernel" in ended.said, ended


LONG_LIST = ", ".join(f"name{number}" for number in range(5000))


@pytest.mark.parametrize("key", ["train.report_to", "eval.tasks", "adapter.target_modules"])
def test_long_override_is_refused_soon(key: str, commands) -> None:
    ended = commands.run("check", str(QUICKSTART), f"{key}=[{LONG_LIST}]")
    assert not ended.wrong and ended.code == 2 and len(ended.said) < 100_000, ended


@pytest.mark.parametrize("key", ["data.name", "model.name", "train.output_dir"])
def test_override_with_bytes_that_are_not_utf8_is_refused(key: str) -> None:
    """The command line of Linux may hold any bytes, which Python reads as half surrogate pairs."""
    with pytest.raises(errors.UserError, match="the text is not UTF-8"):
        loader.load(QUICKSTART, [f"{key}={os.fsdecode(bytes([255, 254, 128]))}"])


def test_a_device_that_finetune_does_not_use_is_refused(monkeypatch) -> None:
    """Accelerate would follow its variable, and finetune would plan for another device."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for device in ("cpu", "cpu:0"):
        monkeypatch.setenv(detection.DEVICE, device)
        assert detection.detect().device == "cpu"
    for device in ("", "cuda", "meta", "cpu:5", "\x1b[31m"):
        monkeypatch.setenv(detection.DEVICE, device)
        with pytest.raises(UserError, match="unset ACCELERATE_TORCH_DEVICE") as raised:
            detection.detect()
        assert raised.value.code == 3 and "\x1b" not in str(raised.value)

"""Documents and rows as Arrow files: written a chunk at a time, read through the page cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from finetune.data.chat import IGNORED

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.data.chat import Encoded

CHUNK = 1000  # rows in a record batch


class Writer:
    """Rows into an Arrow stream, a chunk at a time: input_ids, labels, where they come from, tokens cut."""

    def __init__(self, path: Path, packed: bool = False) -> None:
        self.rows = 0
        tokens = pyarrow.list_(pyarrow.int32())
        columns = {"input_ids": tokens, "labels": tokens, "seq_lengths": tokens}
        columns |= {"where": pyarrow.list_(pyarrow.string()), "cut": tokens}
        self.schema = pyarrow.schema({k: v for k, v in columns.items() if packed or k != "seq_lengths"})
        self.file: Any = pyarrow.OSFile(str(path), "wb")
        self.stream: Any = pyarrow.ipc.new_stream(self.file, self.schema)
        self.clear()

    def clear(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in self.schema.names}

    def add(self, document: Encoded, where: str) -> None:
        ids = np.array(document.ids, dtype=np.int32)
        labels = np.full_like(ids, IGNORED)
        for start, end in document.trained:
            labels[start:end] = ids[start:end]
        self._add(ids, labels, [where], [document.cut], [len(ids)])

    def add_group(self, documents: list[dict[str, Any]]) -> None:
        """Documents end to end; the first token of each is never a target."""
        joined = {name: np.concatenate([d[name] for d in documents]) for name in ("input_ids", "labels")}
        lengths = [len(document["input_ids"]) for document in documents]
        joined["labels"][np.cumsum([0, *lengths[:-1]])] = IGNORED
        where, cut = ([d[name] for d in documents] for name in ("where", "cut"))
        self._add(joined["input_ids"], joined["labels"], where, cut, lengths)

    def _add(self, ids: Any, labels: Any, where: list[str], cut: list[int], lengths: list[int]) -> None:
        row = {"input_ids": ids, "labels": labels, "where": where, "cut": cut, "seq_lengths": lengths}
        for name, column in self.columns.items():
            column.append(row[name])
        self.rows += 1
        if self.rows % CHUNK == 0:
            self.flush()

    def flush(self) -> None:
        if self.columns["where"]:
            self.stream.write_batch(
                pyarrow.record_batch([self._column(name) for name in self.schema.names], self.schema)
            )
            self.clear()

    def _column(self, name: str) -> Any:
        rows, kind = self.columns[name], self.schema.field(name).type
        if name not in ("input_ids", "labels"):
            return pyarrow.array(rows, kind)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        return pyarrow.ListArray.from_arrays(offsets, np.concatenate(rows))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self.stream.close()
        self.file.close()


class Documents:
    """Random access to a file of documents through the page cache, without a copy in memory."""

    def __init__(self, path: Path) -> None:
        with pyarrow.memory_map(str(path)) as content:
            self.batches = pyarrow.ipc.open_stream(content).read_all().to_batches()
        columns = [(batch.column("input_ids"), batch.column("labels")) for batch in self.batches]
        self.offsets = [ids.offsets.to_numpy() for ids, _ in columns]
        self.values = [(ids.values.to_numpy(), labels.values.to_numpy()) for ids, labels in columns]
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self.offsets] or [np.zeros(0, int)])

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch, row = divmod(index, CHUNK)
        start, end = self.offsets[batch][row : row + 2]
        ids, labels = self.values[batch]
        cut = self.batches[batch].column("cut")[row].as_py()[0]
        return {
            "input_ids": ids[start:end],
            "labels": labels[start:end],
            "where": self.place(index),
            "cut": cut,
        }

    def place(self, index: int) -> str:
        batch, row = divmod(index, CHUNK)
        return self.batches[batch].column("where")[row].as_py()[0]

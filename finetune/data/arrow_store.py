"""Store documents as flat files of token ids, and sequences as an Arrow file. Both are memory-mapped."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from finetune.data.loss_mask import IGNORED, WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from finetune.data.encoding import Encoded

# Documents or sequences per write, and their approximate number of tokens
CHUNK, MAX_TOKENS = 1000, 8_000_000
TOKENS = pyarrow.list_(pyarrow.int32())
PLACES = pyarrow.schema({"where": pyarrow.string(), "cut": pyarrow.int32()})


class Documents:
    """Token ids and labels (int32) of all documents, concatenated, and the origin of each document.

    Weights of the loss (float32) begin with the first document that has a weight between 0 and 1.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [(folder / f"{name}.bin").open("wb") for name in ("ids", "labels")]
        self.sink: Any = pyarrow.OSFile(str(folder / "places.arrow"), "wb")
        self.places: Any = pyarrow.ipc.new_stream(self.sink, PLACES)
        self.lengths, self.tokens = array("i"), 0
        self.unweighted: int | None = None
        """Number of tokens before the first stored weight; `None` without weights."""
        self._clear()

    def _clear(self) -> None:
        self.ids, self.labels, self.weights = array("i"), array("i"), array("f")
        self.where: list[str] = []
        self.cut: list[int] = []

    def add(self, document: Encoded, where: str) -> None:
        self.ids.extend(document.ids)
        self.labels.extend(document.labels())
        self.where.append(where)
        self.cut.append(document.cut)
        if document.weights and self.unweighted is None:
            self.unweighted = self.tokens
            self.files.append((self.folder / "weights.bin").open("wb"))
        if self.unweighted is not None:
            self.weights.extend(document.token_weights())
        self.tokens += len(document.ids)
        self.lengths.append(len(document.ids))
        if len(self.where) == CHUNK:
            self._flush()

    def _flush(self) -> None:
        for values, file in zip((self.ids, self.labels, self.weights), self.files, strict=False):
            values.tofile(file)
        columns = [pyarrow.array(self.where), pyarrow.array(self.cut, pyarrow.int32())]
        self.places.write_batch(pyarrow.record_batch(columns, PLACES))
        self._clear()

    def close(self) -> None:
        """Finish writing and open the files for reading."""
        self._flush()
        self.places.close()
        for file in (*self.files, self.sink):
            file.close()
        with pyarrow.memory_map(str(self.folder / "places.arrow")) as content:
            self.table = pyarrow.ipc.open_stream(content).read_all()
        empty = not self.lengths
        self.flat: list[NDArray[np.generic]] = [
            np.zeros(0, np.int32) if empty else np.memmap(file.name, dtype, "r")
            for file, dtype in zip(self.files, (np.int32, np.int32, np.float32), strict=False)
        ]
        self.ends = np.cumsum(np.frombuffer(self.lengths, np.int32), dtype=np.int64)

    def place(self, index: int) -> str:
        return self.table.column("where")[index].as_py()

    def batch(self, order: NDArray[np.int64], counts: NDArray[np.int64]) -> dict[str, Any]:
        """Return the columns of some sequences.

        Args:
            order: indices of the documents, sequence by sequence.
            counts: number of documents in each sequence.
        """
        lengths = np.frombuffer(self.lengths, np.int32)[order]
        stops = np.cumsum(lengths)
        # Position of each token in the flat files: the start of its document plus its offset in the document
        positions = np.repeat(self.ends[order] - stops, lengths) + np.arange(stops[-1])
        ids, labels = (flat[positions] for flat in self.flat[:2])
        labels[stops - lengths] = IGNORED  # the first token of a document is never a target
        documents = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = np.concatenate([[0], stops])[documents].astype(np.int32)
        where, cut = (self.table.column(name).take(order).combine_chunks() for name in ("where", "cut"))
        weighted = {WEIGHTS: pyarrow.ListArray.from_arrays(tokens, self._weights(positions))}
        return {
            "input_ids": pyarrow.ListArray.from_arrays(tokens, ids),
            "labels": pyarrow.ListArray.from_arrays(tokens, labels),
            **(weighted if self.unweighted is not None else {}),
            "seq_lengths": pyarrow.ListArray.from_arrays(documents, lengths),
            "where": pyarrow.ListArray.from_arrays(documents, where),
            "cut": pyarrow.ListArray.from_arrays(documents, cut),
        }

    def _weights(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the weights of the tokens at some positions of the flat files."""
        weights, first = np.ones(len(positions), np.float32), self.unweighted
        if first is not None:
            stored = positions >= first
            weights[stored] = self.flat[2][positions[stored] - first]
        return weights

    def write_rows(
        self, path: Path, order: NDArray[np.int64], counts: NDArray[np.int64], packed: bool
    ) -> None:
        """Write sequences to an Arrow file: input_ids, labels and the origin of each document.

        Packed sequences also store the lengths of their documents. If a token has a weight between 0 and 1,
        all sequences also store the weights of their tokens.

        Args:
            order: indices of the documents, sequence by sequence.
            counts: number of documents in each sequence.
        """
        kinds = dict.fromkeys(("input_ids", "labels"), TOKENS)
        kinds |= {WEIGHTS: pyarrow.list_(pyarrow.float32())} if self.unweighted is not None else {}
        kinds |= {"seq_lengths": TOKENS, "where": pyarrow.list_(pyarrow.string()), "cut": TOKENS}
        schema = pyarrow.schema(
            {name: kind for name, kind in kinds.items() if packed or name != "seq_lengths"}
        )
        ends = np.concatenate([[0], np.cumsum(counts)])
        tokens = int(np.frombuffer(self.lengths, np.int32)[order].sum())
        step = max(1, min(CHUNK, MAX_TOKENS * len(counts) // max(1, tokens)))
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
            for start in range(0, len(counts), step):
                some = counts[start : start + step]
                columns = self.batch(order[ends[start] : ends[start + len(some)]], some)
                stream.write_batch(pyarrow.record_batch([columns[n] for n in schema.names], schema))

    def remove(self) -> None:
        """Delete the files. The Arrow file of the sequences holds all of their content."""
        del self.table, self.flat
        for name in ("ids.bin", "labels.bin", "weights.bin", "places.arrow"):
            (self.folder / name).unlink(missing_ok=name == "weights.bin")

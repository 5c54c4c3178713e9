"""Rows of Parquet files and of the folders that the `datasets` library writes, as a JSONL line would hold them.

Loaded only for those who have such data: pyarrow and datasets are the extra `data`. Knows nothing of what rows mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from ..store import HELDOUT
from .data import CHUNK_ROWS, NEEDED, SAVED, DataError, Record, Source, reading

COLUMNS = ("messages", "conversations", "input_ids", "loss_mask", "tools", "tag", "source", "domain", "split")
"""The columns that mean something; no others are read."""

STATE = "state.json"
"""Names the files of a dataset; others that lie beside them are the library's scratch."""

SPLITS = {"train": None, "heldout": HELDOUT, "validation": HELDOUT, "test": HELDOUT}
"""What the splits of a dataset are here. "train" leaves it to `data.heldout` whether some of it is held out."""

BUFFER = 1 << 20
"""Bytes of a column that are read ahead: a row group, which may be the whole file, is never in memory at once."""

Decode = Callable[[Any], Any]


def parquet(path: Path, name: str) -> Source:
    """The rows of a Parquet file."""

    def count() -> int:
        with reading(path):
            return pq.read_metadata(path).num_rows

    def batches() -> Iterator[list[Record]]:
        with reading(path), pq.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False) as file:
            columns = _columns(name, file.schema_arrow.names)
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(CHUNK_ROWS, row_groups=[group], columns=columns):
                    yield _records(batch)

    return Source(name, "row", None, [path], count, batches)


def saved(path: Path) -> list[Source]:
    """The splits of a `DatasetDict`, or the one `Dataset`, that `save_to_disk` wrote into a folder.

    Raises:
        DataError: a split's name does not say what it is for, or the folder is not whole.
    """
    with reading(path):
        several = path / SAVED[0]
        if not several.is_file():
            return [_split(path, path.name, None)]
        names = json.loads(several.read_text())["splits"]
        unknown = next((name for name in names if name not in SPLITS), None)
        if unknown is not None:
            raise DataError(
                f"the dataset {path} has a split {unknown!r}, which is none of {', '.join(SPLITS)}: "
                f"give the folders of the splits to use, such as {path / unknown}"
            )
        return [_split(path / name, f"{path.name}/{name}", SPLITS[name]) for name in names]


def _split(path: Path, name: str, split: str | None) -> Source:
    files = [path / file["filename"] for file in json.loads((path / STATE).read_text())["_data_files"]]

    def count() -> int:
        with reading(path):
            return Dataset.load_from_disk(str(path)).num_rows

    def batches() -> Iterator[list[Record]]:
        with reading(path):
            data = Dataset.load_from_disk(str(path))
            data = data.select_columns(_columns(name, data.column_names)).with_format("arrow")
            for table in data.iter(CHUNK_ROWS):
                yield _records(table)

    return Source(name, "row", split, files, count, batches)


def _columns(name: str, present: list[str]) -> list[str]:
    if not {"messages", "conversations", "input_ids"} & set(present):
        raise DataError(f"{name}: {NEEDED}; its columns are {', '.join(present)}")
    return [column for column in COLUMNS if column in present]


def _records(table: pa.RecordBatch | pa.Table) -> list[Record]:
    decode = _decoder(pa.struct(table.schema))
    assert decode is not None
    return [decode(row) for row in table.to_pylist()]


def _decoder(kind: pa.DataType) -> Decode | None:
    """What brings a value of an Arrow type into the form that JSON would give it; None where it has it already.

    In Arrow every struct of a column has the same fields, those that a row did not have being null: they are dropped.
    JSON within a column, which `datasets` writes where rows differ too much for that, is text until parsed.
    """
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = _decoder(kind.value_type)
        return item and (lambda values: [value if value is None else item(value) for value in values])
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: _decoder(kind.field(i).type) for i in range(kind.num_fields)}
        return lambda values: {
            name: decode(value) if (decode := fields[name]) else value
            for name, value in values.items()
            if value is not None
        }
    return None

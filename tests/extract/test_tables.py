"""Parquet files and folders of the `datasets` library: the rows that JSONL lines of the same content give."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from tiny import conversation

from dflash_offline.extract.data import CHUNK_ROWS, DataError, Row, count_rows, file_hash, read_rows

Records = list[dict[str, Any]]


def tool_call(**arguments: object) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "look it up"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "this"},
        ]
    }


PLAIN: Records = [
    *({"messages": conversation(n, turns=1 + n % 3), "tag": f"t{n % 2}"} for n in range(2 * CHUNK_ROWS + 3)),
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "split": "heldout"},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {**tool_call(where="here"), "tools": [{"type": "function", "function": {"name": "f"}}]},
    tool_call(near=3, many=[1, None]),
]
"""Rows that Arrow can give one schema, by filling in nulls."""

MIXED: Records = [tool_call(where="here", none=None), tool_call(where=3), {"messages": conversation(5)}]
"""Rows that it cannot: the library then keeps turns as JSON text."""


def columns(records: Records) -> dict[str, list[Any]]:
    """Records as a table has them: what one of them has, all have, if only a null."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def parquet(folder: Path, records: Records) -> Path:
    pq.write_table(pa.table(columns(records)), folder / "x.parquet", row_group_size=CHUNK_ROWS + 1)
    return folder / "x.parquet"


def dataset(folder: Path, records: Records) -> Path:
    Dataset.from_dict(columns(records), on_mixed_types="use_json").save_to_disk(folder / "x")
    return folder / "x"


def parquet_of_dataset(folder: Path, records: Records) -> Path:
    Dataset.from_dict(columns(records), on_mixed_types="use_json").to_parquet(folder / "x.parquet")
    return folder / "x.parquet"


def jsonl_rows(folder: Path, records: Records) -> list[Row]:
    (folder / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_rows([folder / "x.jsonl"]))


@pytest.mark.parametrize(
    ("write", "records"),
    [(parquet, PLAIN), (dataset, PLAIN), (dataset, MIXED), (parquet_of_dataset, MIXED)],
)
def test_rows_are_those_of_jsonl(write: Any, records: Records, tmp_path: Path) -> None:
    path = write(tmp_path, records)
    expected = [replace(row, place=f"{path.name}, row {n}") for n, row in enumerate(jsonl_rows(tmp_path, records), 1)]
    assert list(read_rows([path])) == expected
    assert count_rows([path]) == len(records)


def test_tools_as_text(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": None}}}]
    (row,) = read_rows([parquet(tmp_path, [{"messages": conversation(1), "tools": json.dumps(tools)}])])
    assert row.tools == tools


def test_columns_that_mean_nothing_are_not_read(tmp_path: Path) -> None:
    (row,) = read_rows([parquet(tmp_path, [{"image": b"\xff", "messages": conversation(1), "when": 3}])])
    assert row == Row("x.parquet, row 1", "x", None, messages=conversation(1))
    with pytest.raises(DataError, match=r"x\.parquet: needs 'messages'.*its columns are image, text"):
        list(read_rows([parquet(tmp_path, [{"image": b"\xff", "text": "hi"}])]))


def test_a_bad_row_is_named_by_number(tmp_path: Path) -> None:
    records = [{"messages": conversation(n)} for n in range(CHUNK_ROWS + 9)]
    records[CHUNK_ROWS + 4]["messages"][0]["role"] = "robot"
    for write in (parquet, dataset):
        with pytest.raises(DataError, match=rf", row {CHUNK_ROWS + 5}: unknown role 'robot'"):
            list(read_rows([write(tmp_path, records)]))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path, PLAIN)
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], content[:4] + bytes(200) + content[204:], b""):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"cannot read the data file .*x\.parquet: ") as caught:
            list(read_rows([path]))
        assert "\n" not in str(caught.value)
    folder = dataset(tmp_path, PLAIN)
    next(folder.glob("*.arrow")).unlink()
    with pytest.raises(DataError, match=r"cannot read the data file .*/x: "):
        list(read_rows([folder]))
    with pytest.raises(DataError, match=r"cannot read the data file .*/x: No such file"):
        file_hash(folder)


def test_splits_of_a_dataset(tmp_path: Path) -> None:
    one = Dataset.from_list([{"messages": conversation(n)} for n in range(3)])
    DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "both")
    assert [(row.place, row.tag, row.split) for row in read_rows([tmp_path / "both"])] == [
        *((f"both/train, row {n}", "both", None) for n in (1, 2, 3)),
        ("both/test, row 1", "both", "heldout"),
    ]
    DatasetDict({"train": one, "extra": one}).save_to_disk(tmp_path / "odd")
    with pytest.raises(DataError, match=r"has a split 'extra'.*give the folders.*odd/extra"):
        file_hash(tmp_path / "odd")
    assert {row.split for row in read_rows([tmp_path / "odd" / "extra"])} == {None}


def test_the_hash_of_a_dataset_is_that_of_its_content(tmp_path: Path) -> None:
    path = dataset(tmp_path, PLAIN)
    before = file_hash(path)
    # What the library leaves behind when somebody works with the dataset is no part of it.
    Dataset.load_from_disk(str(path)).map(lambda row: {"length": len(row)})
    assert file_hash(path) == before
    assert file_hash(dataset(tmp_path, PLAIN[1:])) != before


def test_without_the_packages_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [parquet(tmp_path, PLAIN), dataset(tmp_path, PLAIN)]
    monkeypatch.delitem(sys.modules, "dflash_offline.extract.tables", raising=False)
    monkeypatch.delattr("dflash_offline.extract.tables", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in paths:
        with pytest.raises(DataError, match=r"needs the packages pyarrow and datasets: pip install 'dflash-offline\[d"):
            file_hash(path)

"""Lines of data: what is accepted, and the one sentence that each bad line gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_offline.extract.data import CHUNK_ROWS, DataError, Row, count_rows, file_hash, read_rows

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def rows(tmp_path: Path, *lines: object) -> list[Row]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(read_rows([path]))


def test_all_three_forms(tmp_path: Path) -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    ids = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "source": "ids"}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    listed = {"messages": [{"role": "user", "content": parts}, GOOD["messages"][1]], "split": "heldout"}
    first, second, third, fourth = rows(tmp_path, GOOD, sharegpt, "", ids, listed)
    assert first.messages == second.messages == fourth.messages == GOOD["messages"]
    assert (third.input_ids, third.loss_mask, third.tag) == ([1, 2, 3], [False, True, True], "ids")
    assert (first.tag, first.split, fourth.split) == ("data", None, "heldout")
    assert third.place == "data.jsonl, line 4"  # the blank line counts


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [', "not valid JSON"),
        ("[1, 2]", "must be a JSON object"),
        ({"text": "hi"}, "needs 'messages'"),
        ({"messages": []}, "conversation is empty"),
        ({"conversations": []}, "conversation is empty"),
        ({"messages": "hi"}, "messages must be a list of turns, not str"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "unknown role 'robot'"),
        ({"messages": ["hi"]}, "a turn must be an object"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant turn"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text, not int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images are not supported"),
        ({"input_ids": [1, 2]}, "one 0 or 1 for each of the 2"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "one 0 or 1 for each of the 2"),
        ({"input_ids": [], "loss_mask": []}, "not empty"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "list of token ids"),
        ({**GOOD, "split": "test"}, "split must be"),
        ({**GOOD, "tools": "{}"}, "tools must be a list"),
        ({**GOOD, "tools": "{"}, "tools is not valid JSON"),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        rows(tmp_path, GOOD, GOOD, line)
    assert "data.jsonl, line 3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: No such file"):
        list(read_rows([tmp_path / "nothing.jsonl"]))


def test_a_folder_of_shards_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    (folder / "inner").mkdir(parents=True)
    for name, count in (("b.jsonl", 2), ("a.jsonl", CHUNK_ROWS + 2), ("inner/c.jsonl", 1), (".hidden.jsonl", 1)):
        (folder / name).write_text((json.dumps(GOOD) + "\n") * count)
    (folder / "README.md").write_text("no data")
    found = list(read_rows([folder]))
    assert [row.place for row in found] == [
        *(f"chats/a.jsonl, line {n}" for n in range(1, CHUNK_ROWS + 3)),
        "chats/b.jsonl, line 1",
        "chats/b.jsonl, line 2",
    ]
    assert {row.tag for row in found} == {"chats"}
    assert count_rows([folder]) == len(found)
    with pytest.raises(DataError, match=r"holds no \*\.jsonl or \*\.parquet files"):
        file_hash(tmp_path)


def test_the_hash_of_a_folder_is_that_of_what_is_read_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    lines = [json.dumps({**GOOD, "tag": str(n)}) + "\n" for n in range(3)]

    def hash_of(**shards: str) -> str:
        for path in folder.glob("*.jsonl"):
            path.unlink()
        for name, content in shards.items():
            (folder / f"{name}.jsonl").write_text(content)
        return file_hash(folder)

    first = hash_of(a=lines[0], b=lines[1])
    (folder / "README.md").write_text("not read")
    assert hash_of(b=lines[1], a=lines[0]) == first
    others = [{"a": lines[0], "b": lines[2]}, {"a": lines[1], "b": lines[0]}, {"a": lines[0], "c": lines[1]}]
    assert len({first, *(hash_of(**other) for other in others)}) == 4

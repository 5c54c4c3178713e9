"""Lines of data: what is accepted, and the one sentence that each bad line gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_offline.extract.data import DataError, Row, read_rows

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
        ({"messages": "hi"}, "conversation is empty"),
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

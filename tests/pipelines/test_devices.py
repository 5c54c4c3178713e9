"""`--gpus`."""

from __future__ import annotations

import pytest

from dflash_offline.pipelines.config import ConfigError
from dflash_offline.pipelines.devices import parse_gpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-4", ["0", "1", "2", "3", "4"]),
        ("0,2,5-7", ["0", "2", "5", "6", "7"]),
        ("all", [str(n) for n in range(8)]),
        (" CPU ", ["cpu"]),
        ("3", ["3"]),
        ("1, 2", ["1", "2"]),
    ],
)
def test_what_is_understood(text: str, expected: list[str]) -> None:
    assert parse_gpus(text, 8) == expected


@pytest.mark.parametrize(
    ("text", "available", "says"),
    [
        ("9", 8, "there is no GPU 9, this machine has 8 GPUs"),
        ("9", 0, "there is no GPU 9, this machine has no GPU; use cpu"),
        ("all", 0, "this machine has no GPU: pass --gpus cpu"),
        ("4-2", 8, "not understood"),
        ("", 8, "not understood"),
        ("gpu0", 8, "not understood"),
        ("0-2,1", 8, "names GPU 1 twice"),
    ],
)
def test_what_is_refused(text: str, available: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_gpus(text, available)

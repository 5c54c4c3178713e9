"""`--gpus`."""

from __future__ import annotations

import os

import pytest

from dflash_offline.pipelines.config import ConfigError
from dflash_offline.pipelines.devices import choose_devices, own_device, own_rank, parse_gpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-4", ["0", "1", "2", "3", "4"]),
        ("0,2,5-7", ["0", "2", "5", "6", "7"]),
        ("all", [str(n) for n in range(8)]),
        (" CPU ", ["cpu"]),
        ("cpu, CPU,cpu", ["cpu", "cpu", "cpu"]),
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
        ("cpu,1", 8, "the CPU beside something else"),
        ("cpu,", 8, "the CPU beside something else"),
    ],
)
def test_what_is_refused(text: str, available: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_gpus(text, available)


def test_the_cpu_however_often_hides_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert choose_devices("cpu,cpu") == ["cpu", "cpu"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_rank_has_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert own_rank() is None
    for name, value in {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert own_rank() == 5
    assert own_device(["5", "7"]) == "7"
    assert own_device(["cpu"]) == "cpu"
    with pytest.raises(ConfigError, match="names 1 GPU, too few for local rank 1"):
        own_device(["5"])
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="start ranks with torchrun or --gpus"):
        own_device(["5", "7"])

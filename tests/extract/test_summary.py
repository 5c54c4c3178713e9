"""What an extraction says it took."""

from __future__ import annotations

import pytest
from stores import IDENTITY

from dflash_offline.extract.summary import device_rate, summary
from dflash_offline.extract.unit import UnitReport


def test_the_cost_of_each_part_is_said() -> None:
    reports = [
        UnitReport(600, computed=640, forward=2.0, copy=0.1, write=1.5, wait=0.5, splits=1, fp8_errors=[0.1, 0.2, 0.3]),
        UnitReport(400, computed=410, forward=3.0, copy=0.1, write=2.0, wait=0.0),
        UnitReport(9999),  # was there before
    ]
    first, splits, errors = summary(reports, IDENTITY)
    assert first == (
        "forward passes 5.0 s (200 tokens a second, 4.8% padding); beside them copies 0.2 s and writing 3.5 s; "
        "waiting for the disk 0.5 s"
    )
    assert splits.startswith("1 batches were split")
    assert errors.endswith("1: 10.0%, 3: 20.0%, final: 30.0%")
    assert device_rate(reports, 2) == pytest.approx(1000 / 5.5 / 2)
    assert summary(reports[2:], IDENTITY) == []
    assert device_rate(reports[2:], 1) is None

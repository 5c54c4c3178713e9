"""Numbers from walked or decoded turns: accepted length, acceptance by position and by tag. Knows rounds only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .walk import Turn


def accepted_length(turns: Sequence[Turn]) -> float:
    """Tokens produced a round over all rounds; 1.0 is what no drafter at all gives. NaN without rounds."""
    rounds = [item for turn in turns for item in turn.rounds]
    return sum(item.produced for item in rounds) / len(rounds) if rounds else math.nan


def acceptance_by_position(turns: Sequence[Turn], block: int) -> list[float]:
    """For slots 1..B-1, the share of rounds that accepted that slot, of the rounds whose turn reached that far."""
    shares = []
    for slot in range(1, block):
        reached = accepted = 0
        for turn in turns:
            for item in turn.rounds:
                if item.anchor + slot < turn.stop:
                    reached += 1
                    accepted += item.right >= slot
        shares.append(accepted / reached if reached else math.nan)
    return shares


def summarize(turns: Sequence[Turn], block: int) -> dict[str, Any]:
    """All of it, ready for JSON (a number that does not exist is None)."""
    by_tag = {
        tag: accepted_length([turn for turn in turns if turn.tag == tag]) for tag in sorted({t.tag for t in turns})
    }
    return {
        "turns": len(turns),
        "rounds": sum(len(turn.rounds) for turn in turns),
        "tokens": sum(item.produced for turn in turns for item in turn.rounds),
        "accepted_length": _number(accepted_length(turns)),
        "acceptance_by_position": [_number(share) for share in acceptance_by_position(turns, block)],
        "accepted_length_by_tag": {tag: _number(value) for tag, value in by_tag.items()},
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value

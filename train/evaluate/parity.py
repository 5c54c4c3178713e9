"""Holding two ways of counting against each other: the walk over states and real decoding, round by round.

They can part only where two logits nearly tie, since they compute the same numbers in another order. Knows rounds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .walk import Round

NEAR_TIE = {torch.float32: 1e-2, torch.bfloat16: 0.25}
"""Logits closer than this may change places between two orders of computation, by what a drafter computes in: states
are rounded to bfloat16 either way, and logits near 16 are 0.125 apart when they are bfloat16 too."""


@dataclass(frozen=True)
class Parity:
    """Attributes:
    same: rounds that agree before the first that does not.
    compared: rounds of the shorter list.
    margin: at the first disagreement, how nearly the deciding logits tied; None when there is none.
    """

    same: int
    compared: int
    margin: float | None

    def agrees(self, near_tie: float) -> bool:
        """No disagreement, or one that begins where logits are closer than `near_tie`."""
        return self.margin is None or self.margin < near_tie


def compare_rounds(walked: Sequence[Round], decoded: Sequence[Round]) -> Parity:
    """Compare the rounds of one turn."""
    for place, (one, other) in enumerate(zip(walked, decoded, strict=False)):
        if (one.anchor, one.produced) != (other.anchor, other.produced):
            return Parity(place, min(len(walked), len(decoded)), min(one.margin, other.margin))
    if len(walked) != len(decoded):
        longer = max(walked, decoded, key=len)
        compared = min(len(walked), len(decoded))
        return Parity(compared, compared, longer[compared].margin)
    return Parity(len(walked), len(walked), None)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part, or None when they are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))

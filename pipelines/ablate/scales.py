"""Axes with round numbers, and labels kept apart: the arithmetic of a chart, without its looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Round numbers that span a range, and where they lie on the chart: from `start` to `stop`."""

    ticks: list[float]
    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """Where a value lies."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def label(self, tick: float, percent: bool = False) -> str:
        """A tick's number, with as many decimals as the ticks need."""
        if percent:
            return f"{100 * tick:.{decimals_of(100 * self._step)}f}%"
        return f"{tick:,.{decimals_of(self._step)}f}".replace("-", "−")

    @property
    def _step(self) -> float:
        return self.ticks[1] - self.ticks[0]


def decimals_of(step: float) -> int:
    """Decimals that tell multiples of a step apart."""
    return next((places for places in range(8) if abs(round(step, places) - step) < 1e-3 * step), 8)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `most` or so, that span low..high: two at the least."""
    if not high > low:
        low, high = low - (abs(low) or 1) * 0.05, low + (abs(low) or 1) * 0.05
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def spread(low: float, high: float, most: int, start: float, stop: float, whole: bool = False) -> Axis:
    """An axis that ends where the numbers end, its ticks the round ones within."""
    if not high > low:
        low, high = low - 1, high + 1
    inside = [tick for tick in ticks(low, high, most) if low - 1e-9 <= tick <= high + 1e-9]
    if whole:
        inside = [tick for tick in inside if tick == int(tick)]
    return Axis(inside if len(inside) > 1 else [low, high], low, high, start, stop)


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places in order, moved as little as keeps them `gap` apart, between low and high if there is room."""
    # Clusters of touching places sit around their mean; a cluster that meets the one before becomes one with it.
    clusters: list[list[float]] = []
    for place in places:
        clusters.append([place])
        while True:
            count = len(clusters[-1])
            middle = sum(clusters[-1]) / count
            half = (count - 1) * gap / 2
            middle = max(low + half, min(middle, high - half))
            if len(clusters) < 2 or _top(clusters[-2], gap, low, high) + gap <= middle - half:
                break
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    found: list[float] = []
    for cluster in clusters:
        last = _top(cluster, gap, low, high)
        found += [last - (len(cluster) - 1 - i) * gap for i in range(len(cluster))]
    return found


def _top(cluster: Sequence[float], gap: float, low: float, high: float) -> float:
    """Where the last place of a cluster comes to lie."""
    half = (len(cluster) - 1) * gap / 2
    return max(low + half, min(sum(cluster) / len(cluster), high - half)) + half

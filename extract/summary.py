"""What an extraction took, in lines for a person, from the reports of its units."""

from __future__ import annotations

from collections.abc import Sequence

from ..store import Identity
from .unit import UnitReport


def summary(reports: Sequence[UnitReport], identity: Identity) -> list[str]:
    """The cost of each part of the work, and how far off fp8 products are; nothing when no unit was computed."""
    done = [report for report in reports if report.computed]
    if not done:
        return []
    forward, copy, write, wait = (
        sum(getattr(report, part) for report in done) for part in ("forward", "copy", "write", "wait")
    )
    tokens, computed = sum(report.tokens for report in done), sum(report.computed for report in done)
    lines = [
        f"forward passes {forward:.1f} s ({tokens / forward:,.0f} tokens a second, {1 - tokens / computed:.1%} padding)"
        f"; beside them copies {copy:.1f} s and writing {write:.1f} s; waiting for the disk {wait:.1f} s"
    ]
    if splits := sum(report.splits for report in done):
        lines.append(f"{splits} batches were split for lack of memory: lower extract.batch_tokens for another run")
    if errors := done[0].fp8_errors:
        names = [*map(str, identity.layer_ids), *(["final"] if identity.final else [])]
        said = ", ".join(f"{name}: {error:.1%}" for name, error in zip(names, errors, strict=True))
        lines.append(f"states with fp8 products differ from bfloat16's by (relative, by layer) {said}")
    return lines


def device_rate(reports: Sequence[UnitReport], gpus: int) -> float | None:
    """Tokens a second of one device while it worked, loading left out; None when no unit was computed.

    Args:
        gpus: devices that a target was spread over.
    """
    done = [report for report in reports if report.computed]
    busy = sum(report.forward + report.wait for report in done)
    return sum(report.tokens for report in done) / busy / gpus if busy else None

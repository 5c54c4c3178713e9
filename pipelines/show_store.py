"""A store on a terminal: tables and small charts. Knows what the functions of the store return, computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.table import Table

from ..store import Identity, Store
from ..store.reader import stored_bytes
from ..store.room import size
from .console import console

if TYPE_CHECKING:
    from ..store.verify import Report

BAR = 28
"""Columns of a bar that stands for everything."""
SHOWN = 20
"""Problems printed; --json has all."""


def show_info(info: dict[str, Any]) -> None:
    """The result of `dflash store info`."""
    identity = info["identity"]
    table = Table(show_header=False)
    table.add_row("store", info["path"])
    for split, counts in info["splits"].items():
        table.add_row(
            split,
            f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['supervised_tokens']:,} of them supervised",
        )
    table.add_row("parts", f"{info['parts']:,}")
    table.add_row("size", size(info["bytes"]))
    table.add_row("documents by tag", ", ".join(f"{tag} {count:,}" for tag, count in info["tags"].items()))
    for key, value in identity.items():
        table.add_row(key, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    console.print(table)
    if lost := info["lost_parts"]:
        console.print(
            f"warning: {len(lost)} of these parts are in the manifest only ({lost[0]}, ...): they were deleted or "
            "lost; `dflash extract` makes them again",
            style="bold",
            markup=False,
        )


def show_stats(found: dict[str, Any]) -> None:
    """The result of `dflash store stats`."""
    splits = ", ".join(f"{split} {counts['documents']:,}" for split, counts in found["splits"].items())
    console.print(f"{found['path']}: {found['documents']:,} documents ({splits}), {found['tokens']:,} tokens")
    console.print(f"tokens a document: {found['shortest']:,} to {found['longest']:,}, median {found['median']:,}\n")
    _chart("tag", [(row["tag"] or "(none)", row) for row in found["tags"]])
    _chart("length", [(f"{row['from']:,}-{row['to']:,}", row) for row in found["lengths"]])


def _chart(title: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in ("documents", "tokens", "share"):
        table.add_column(name, justify="right")
    table.add_column("of the tokens", width=BAR)
    for name, row in rows:
        bar = Bar(1.0, 0.0, row["share"], width=BAR)
        table.add_row(name, f"{row['documents']:,}", f"{row['tokens']:,}", f"{100 * row['share']:.1f}%", bar)
    console.print(table)
    console.print()


def show_verification(where: str, report: Report) -> None:
    """The result of `dflash store verify`."""
    rate = f"{size(report.bytes)} in {report.seconds:.1f} s, {size(report.bytes / max(report.seconds, 1e-9))}/s"
    if not report.problems:
        console.print(f"{where}: {report.parts} parts are whole ({rate})", markup=False)
        return
    for problem in report.problems[:SHOWN]:
        console.print(f"  {problem}", markup=False)
    if len(report.problems) > SHOWN:
        console.print(f"  and {len(report.problems) - SHOWN} more: --json lists all")
    console.print(
        f"{where}: {len(report.problems)} problems in {report.parts} parts ({rate})", style="bold", markup=False
    )
    there = [name for name in report.damaged if name not in report.lost]  # what is gone, `dflash extract` makes again
    if there:
        names = " ".join(f"--delete-part {name}" for name in there[:3])
        more = " ..." if len(there) > 3 else ""
        console.print(
            f"to make damaged parts again: dflash store prune {where} {names}{more} --yes, then dflash extract",
            markup=False,
        )


def describe_pruning(store: Store, identity: Identity) -> str:
    """What pruning to an identity does, in one line."""
    changes = "; ".join(store.identity.differences(identity, "now", "then")) or "nothing changes"
    after = stored_bytes(identity, store.tokens)
    return f"{store.place}: {size(store.bytes_stored())} become {size(after)} ({changes})"

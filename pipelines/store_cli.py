"""The commands under `dflash store`: parse, call, print. They load neither torch nor the stages."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

store_app = typer.Typer(no_args_is_help=True, help="Look into a store, check it, copy it, make it smaller.")

Json = Annotated[bool, typer.Option("--json", help="print JSON only")]
Where = Annotated[
    str | None, typer.Argument(help="the store's path or s3:// address; by default what dflash.toml names")
]


@store_app.command()
def info(path: Where = None, json_: Json = False) -> None:
    """What is in a store: documents, tokens, bytes, layers, identity."""
    from ..store import open_store
    from ..store.stats import store_info
    from .show_store import show_info

    found = store_info(open_store(_named(path)))
    print_json(found) if json_ else show_info(found)


@store_app.command()
def stats(path: Where = None, json_: Json = False) -> None:
    """What the text is made of: documents and tokens by tag and by length."""
    from ..store import open_store
    from ..store.stats import store_stats
    from .show_store import show_stats

    found = store_stats(open_store(_named(path)))
    print_json(found) if json_ else show_stats(found)


@store_app.command()
def verify(
    path: Where = None,
    threads: Annotated[int | None, typer.Option(min=1, help="parts looked at a time")] = None,
    json_: Json = False,
) -> None:
    """Whether every byte is what was written. Names all that is damaged; exit code 1 if anything is."""
    from ..store.verify import verify as run
    from .console import reporting
    from .show_store import show_verification

    where = _named(path)
    with reporting("verify", "MB", quiet=json_) as listener:
        report = run(where, listener, threads)
    if json_:
        print_json({"path": where, "whole": not report.problems, **asdict(report)})
    else:
        show_verification(where, report)
    if report.problems:
        raise typer.Exit(1)


@store_app.command()
def copy(
    source: Annotated[str, typer.Argument(help="the store's path or s3:// address")],
    target: Annotated[str, typer.Argument(help="where to: a path, or an address such as s3://bucket/prefix")],
    json_: Json = False,
) -> None:
    """Copy a store, verified; a copy that was interrupted goes on."""
    from ..store.copy import copy_store
    from .console import console, reporting

    with reporting("copy", "tokens", quiet=json_) as listener:
        made = copy_store(source, target, listener)
    found = {"path": str(made.place), "parts": len(made.parts), "tokens": made.tokens}
    if json_:
        print_json(found)
    else:
        console.print(f"{made.place}: {len(made.parts)} parts, {made.tokens:,} tokens, verified", markup=False)


@store_app.command()
def prune(
    path: Where = None,
    layers: Annotated[str | None, typer.Option(help="layer ids to keep, such as 1,16,31; others are dropped")] = None,
    drop_final: Annotated[bool, typer.Option("--drop-final", help="drop the final states")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="convert to fp8, half the bytes; cannot be undone")] = False,
    delete_part: Annotated[list[str] | None, typer.Option(help="delete a part by id; may be given again")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    json_: Json = False,
) -> None:
    """Make a store smaller. What is dropped is gone: only another extraction brings it back."""
    from ..store import StoreError, open_store
    from ..store.prune import delete_parts, pruned_identity
    from ..store.prune import prune as run
    from ..store.room import size
    from .console import console, reporting
    from .show_store import describe_pruning

    where = _named(path)
    if delete_part and (layers or drop_final or fp8):
        raise StoreError("--delete-part goes by itself: delete parts first, then call prune again for the rest")
    if delete_part:
        _ask(f"{where}: delete {len(delete_part)} parts ({', '.join(delete_part)})", yes)
        delete_parts(where, delete_part)
        found: dict[str, Any] = {"path": where, "deleted": delete_part}
        print_json(found) if json_ else console.print(f"deleted {', '.join(delete_part)}", markup=False)
        return
    store = open_store(where)
    kept = None if layers is None else _numbers(layers)
    identity = pruned_identity(store.identity, layers=kept, drop_final=drop_final, fp8=fp8)
    if not (layers or drop_final or fp8):
        raise StoreError("say what to prune: --layers, --drop-final, --fp8 or --delete-part")
    before = store.bytes_stored()
    _ask(describe_pruning(store, identity), yes)
    with reporting("prune", "tokens", quiet=json_) as listener:
        pruned = run(where, identity, listener)
    found = {"path": where, "bytes_before": before, "bytes": pruned.bytes_stored()}
    if json_:
        print_json(found)
    else:
        console.print(f"{where}: {size(before)} before, {size(found['bytes'])} now", markup=False)


def print_json(value: Any) -> None:
    """Print a result for programs."""
    print(json.dumps(value, indent=2))


def _named(path: str | None) -> str:
    from .location import named_store

    return named_store(Path.cwd()) if path is None else path


def _numbers(text: str) -> list[int]:
    from ..store import StoreError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise StoreError(f"--layers {text}: write ids with commas between them, such as 1,16,31") from None


def _ask(what: str, yes: bool) -> None:
    import sys

    from ..store import StoreError

    if yes:
        return
    if not sys.stdin.isatty():
        raise StoreError(f"{what}: nothing was done; say --yes to do it without being asked")
    typer.confirm(f"{what}: go on?", abort=True)

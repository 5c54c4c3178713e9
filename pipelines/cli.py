"""The command line: parses, calls, prints. Every error a person can put right is one sentence and exit code 1."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from .recipes import PUBLISHED, RECIPES
from .stopping import AGAIN, STOPPED
from .store_cli import Json, print_json, store_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train DFlash drafters for Qwen targets from hidden states kept in a Zarr store.",
)
app.add_typer(store_app, name="store")

Gpus = Annotated[str, typer.Option(help="devices: 0-4, or 0,2,5-7, or all, or cpu; cpu,cpu: two processes there")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a setting: section.key=value")]


@app.command()
def init(
    target: Annotated[str, typer.Option(help="folder of the target, or its name on the hub")],
    data: Annotated[
        list[str],
        typer.Option(help="JSONL or Parquet file, a folder of them, or one of save_to_disk; may be given again"),
    ],
    recipe: Annotated[str, typer.Option(help=f"what to train for: {' or '.join(RECIPES)}")] = PUBLISHED,
    set_: Set = None,
    force: Annotated[bool, typer.Option(help="write over an existing dflash.toml")] = False,
) -> None:
    """Write dflash.toml with what the target's config implies."""
    from .init import init as run

    path, info = run(Path.cwd(), target, data, set_ or [], force, recipe)
    print(f"wrote {path} ({recipe}) for a target of {info.num_layers} layers, hidden size {info.hidden_size}")
    print("next: dflash extract --gpus ..., then dflash train --gpus ...")


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option(help="the store's path or address; by default dflash.toml's")] = None,
    disk: Annotated[bool, typer.Option(help="measure how fast the store's disk writes and reads")] = True,
    json_: Json = False,
) -> None:
    """Whether this machine has what it needs, and what to install. Exit code 1 if something needed is missing."""
    from .console import console
    from .doctor.run import examine, failed
    from .doctor.show import as_json, show_checks

    looking = "looking" + "; the disk takes ten seconds at most" * disk
    with nullcontext() if json_ else console.status(looking):
        checks = examine(Path.cwd(), store, disk)
    print_json(as_json(checks)) if json_ else show_checks(checks)
    if failed(checks):
        raise typer.Exit(1)


@app.command()
def plan(
    gpus: Gpus = "all",
    rate: Annotated[float | None, typer.Option(min=1, help="tokens a second of one GPU, for the hours")] = None,
    json_: Json = False,
    set_: Set = None,
) -> None:
    """What extraction will take before anything runs: tokens, bytes, room, hours. The GPUs need not be here."""
    from .config import load_settings
    from .console import reporting
    from .plan import plan as run
    from .show_plan import show_plan

    settings = load_settings(Path.cwd(), set_ or [])
    with reporting("plan", "documents", quiet=json_) as listener:
        found = run(Path.cwd(), settings, gpus, rate, listener)
    print_json(found) if json_ else show_plan(found)


@app.command()
def extract(
    gpus: Annotated[
        str | None,
        typer.Option(help="devices: 0-4, or 0,2,5-7, or all (the default), or cpu; cpu,cpu: two workers there"),
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="use the workers of a Dask scheduler: tcp://host:8786")] = None,
    target_dtype: Annotated[str | None, typer.Option(help="sets target.dtype: auto, bfloat16, float32 or fp8")] = None,
    gpus_per_target: Annotated[
        int | None, typer.Option(min=1, help="sets target.gpus: spread a target over so many")
    ] = None,
    allow_slow: Annotated[bool, typer.Option("--allow-slow", help="go on without flash-linear-attention")] = False,
    set_: Set = None,
) -> None:
    """Stage one: run the target and write its hidden states to the store. Resumes by itself."""
    from .config import load_settings
    from .console import console, reporting
    from .devices import choose_devices
    from .location import ConfigError
    from .stages import run_extract, run_extract_on

    said = {
        "target.dtype": target_dtype,
        "target.gpus": gpus_per_target,
        "extract.allow_slow": "true" if allow_slow else None,
    }
    settings = load_settings(Path.cwd(), [*(set_ or []), *(f"{k}={v}" for k, v in said.items() if v is not None)])
    if scheduler and gpus:
        raise ConfigError(
            f"--gpus does not go with --scheduler: add this machine's GPUs with "
            f"`dflash worker --scheduler {scheduler} --gpus {gpus}`, then extract without --gpus"
        )
    # Asked to end, it ends as on Ctrl-C: workers closed, the index written.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_once)
    with reporting("extract", "tokens") as listener:
        if scheduler:
            store = run_extract_on(Path.cwd(), settings, scheduler, listener)
        else:
            store = run_extract(Path.cwd(), settings, choose_devices("all" if gpus is None else gpus), listener)
    documents = sum(part.documents for part in store.parts)
    console.print(f"{store.place}: {documents:,} documents, {store.tokens:,} tokens in {len(store.parts)} parts")


@app.command()
def worker(
    scheduler: Annotated[str, typer.Option(help="the Dask scheduler to join: tcp://host:8786")],
    gpus: Gpus = "all",
    gpus_per_target: Annotated[int, typer.Option(min=1, help="GPUs of each worker: the setting target.gpus")] = 1,
    interface: Annotated[str | None, typer.Option(help="network interface, if not the one to the scheduler")] = None,
) -> None:
    """Add this machine's GPUs to a scheduler that `dflash extract --scheduler` uses. Ends when the scheduler does."""
    from ..extract.cluster import serve
    from .console import console
    from .devices import choose_devices

    serve(scheduler, choose_devices(gpus), gpus_per_target, interface, console.print)


@app.command()
def train(
    gpus: Gpus = "all",
    wait: Annotated[
        bool, typer.Option("--wait", help="wait for the store's first training documents, beside dflash extract")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="report progress as JSON lines")] = False,
    set_: Set = None,
) -> None:
    """Stage two: train a drafter from the store, with one process a GPU. Resumes by itself. Runs under torchrun too."""
    from .training import train as run

    if code := run(Path.cwd(), gpus, set_ or [], wait, json_):
        raise typer.Exit(code)


@app.command()
def ablate(
    sweep: Annotated[Path, typer.Argument(help="a TOML file: a base, and a grid or a list of named variants")],
    gpus: Gpus = "all",
    set_: Set = None,
) -> None:
    """Train variants of a drafter side by side, one process a GPU; then one table and one report. Resumes by itself."""
    from .ablate.run import ablate as run
    from .devices import choose_devices

    if not run(Path.cwd(), sweep, set_ or [], choose_devices(gpus)):
        raise typer.Exit(1)


@app.command()
def evaluate(
    gpus: Gpus = "all",
    target: Annotated[bool, typer.Option("--target", help="decode with the target too")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="a drafter's folder; by default the run's last")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="held-out documents to use")] = None,
    json_: Json = False,
    set_: Set = None,
) -> None:
    """Acceptance on held-out documents: from states, and with --target in real speculative decoding."""
    from .config import load_settings
    from .console import reporting
    from .devices import choose_devices
    from .show import show_evaluation
    from .stages import run_evaluate

    settings = load_settings(Path.cwd(), set_ or [])
    device = choose_devices(gpus)[0]
    with reporting("decode", "turns", quiet=json_) as listener:
        result = run_evaluate(
            Path.cwd(),
            settings,
            device,
            checkpoint=checkpoint,
            decode=target,
            documents=documents,
            listener=listener,
        )
    print_json(result) if json_ else show_evaluation(result)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder to work in; made if need be")] = Path("dflash-demo"),
    gpus: Gpus = "cpu",
) -> None:
    """The whole pipeline on the bundled tiny target, in minutes on a CPU."""
    from .demo.run import demo as run
    from .devices import choose_devices

    run(out, choose_devices(gpus))


def stop_once(number: int, frame: object) -> None:
    """Handles Ctrl-C: says so, and asks for patience, since ending workers in good order takes some seconds."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    print("dflash: stopping, a few seconds", file=sys.stderr, flush=True)
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; turns errors that a person can put right into one sentence."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from ..store.format import DflashError
    from .console import fail, reason

    try:
        app()
    except (DflashError, OSError) as error:
        fail(reason(error))
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, SystemExit) and leaving.code != STOPPED:
            raise
        if os.environ.get("RANK", "0") == "0":  # the others of a run say nothing
            fail(AGAIN)
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()

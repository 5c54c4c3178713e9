"""The command line: parses, calls, prints. Every error a person can put right is one sentence and exit code 1."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .store_cli import Json, print_json, store_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train DFlash drafters for Qwen targets from hidden states kept in a Zarr store.",
)
app.add_typer(store_app, name="store")

Gpus = Annotated[str, typer.Option(help="devices: 0-4, or 0,2,5-7, or all, or cpu")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a setting: section.key=value")]


@app.command()
def init(
    target: Annotated[str, typer.Option(help="folder of the target, or its name on the hub")],
    data: Annotated[list[str], typer.Option(help="a JSONL file of conversations; may be given again")],
    set_: Set = None,
    force: Annotated[bool, typer.Option(help="write over an existing dflash.toml")] = False,
) -> None:
    """Write dflash.toml with what the target's config implies."""
    from .init import init as run

    path, info = run(Path.cwd(), target, data, set_ or [], force)
    print(f"wrote {path} for a target of {info.num_layers} layers, hidden size {info.hidden_size}")
    print("next: dflash extract --gpus ..., then dflash train --gpus ...")


@app.command()
def extract(gpus: Gpus = "all", set_: Set = None) -> None:
    """Stage one: run the target and write its hidden states to the store. Resumes by itself."""
    from .config import load_settings
    from .console import console, reporting
    from .devices import choose_devices
    from .stages import run_extract

    settings = load_settings(Path.cwd(), set_ or [])
    devices = choose_devices(gpus)
    with reporting("extract", "tokens") as listener:
        store = run_extract(Path.cwd(), settings, devices, listener)
    documents = sum(part.documents for part in store.parts)
    console.print(f"{store.place}: {documents:,} documents, {store.tokens:,} tokens in {len(store.parts)} parts")


@app.command()
def train(gpus: Gpus = "all", set_: Set = None) -> None:
    """Stage two: train a drafter from the store. Resumes by itself."""
    from .config import load_settings
    from .console import console, reporting
    from .devices import choose_devices
    from .stages import run_train

    settings = load_settings(Path.cwd(), set_ or [])
    devices = choose_devices(gpus)
    with reporting("train", "updates") as listener:
        checkpoint = run_train(Path.cwd(), settings, devices, listener)
    console.print(f"the drafter is in {checkpoint}")


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


def main() -> None:
    """Run the command line; turns errors that a person can put right into one sentence."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from ..store.format import DflashError
    from .console import fail

    try:
        app()
    except DflashError as error:
        fail(str(error))
        sys.exit(1)
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename or 'see the path in your settings'}")
        sys.exit(1)
    except KeyboardInterrupt:
        fail("stopped; run the same command again to go on")
        sys.exit(130)


if __name__ == "__main__":
    main()

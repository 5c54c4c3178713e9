"""One rank of a run, for tests: `python rank_program.py STORE FOLDER SETTINGS` with torchrun's variables."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import torch
from test_trainer import trainer

from dflash_offline.store import open_store
from dflash_offline.store.progress import SILENT, Listener
from dflash_offline.train.ranks import PEER_LOST, PeerLost, join
from dflash_offline.train.trainer import Stopped

STOPPED = 130


def main(store: str, folder: str, settings: str) -> int:
    """Train; the exit code that a rank of `dflash train` has."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > 1
    with join(torch.device("cuda" if cuda else "cpu")) as ranks:
        listener = Listener(lambda line: print(line, flush=True), SILENT.start, SILENT.advance)
        run = trainer(open_store(store), Path(folder), listener=listener, ranks=ranks, **json.loads(settings))
        signal.signal(signal.SIGTERM, lambda *_: run.ask_to_stop())
        print("ready", flush=True)
        try:
            run.run()
        except Stopped:
            return STOPPED
        except PeerLost:
            return PEER_LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

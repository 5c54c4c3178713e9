"""Corpora kept for another run: tokenised data in the user's cache folder, under a key of all that decides it.

An entry is whole or it is not used: it comes into place by a rename, with the hashes of its files. Knows nothing of
how a corpus is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from ..store.files import rename_whole
from ..store.place import Directory
from ..store.sums import LIST, check_files, sum_files
from .corpus import Corpus, Notes
from .render import Renderer
from .settings import DataSettings
from .user_cache import cache_folder

FORMAT = 1
"""To be raised whenever the same data would make another corpus, or an entry is written in another way."""

KEPT = 5
"""Entries that stay; those used longest ago go."""

NOTES = "notes.json"
FILES = {"corpus.safetensors", "corpus.json", NOTES}


def corpora_folder() -> Path:
    """Where corpora are kept. Raises RuntimeError: there is no home directory."""
    return cache_folder() / "corpora"


def corpus_key(digests: dict[str, str], renderer: Renderer, settings: DataSettings, vocab_size: int) -> str:
    """The key of the corpus that data files (name and sha256 each, in order) make with these settings."""
    libraries = [version(name) for name in ("dflash-offline", "transformers", "tokenizers", "jinja2")]
    data = list(digests.items())
    deciding = [FORMAT, libraries, data, renderer.fingerprint, settings.model_dump(exclude={"files"}), vocab_size]
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def kept_corpus(key: str) -> tuple[Corpus, Notes] | None:
    """The corpus of a key and what was noted when it was made; None when there is none, or none that is whole."""
    try:
        folder = corpora_folder() / key
        listed = json.loads((folder / LIST).read_text())
        if listed.keys() != FILES or check_files(Directory(folder.parent), key, listed):
            return None
        notes = Notes(**json.loads((folder / NOTES).read_text()))
        corpus = Corpus.load(folder)
        with suppress(OSError):  # used now; a folder that may only be read serves as well
            os.utime(folder)
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return corpus, notes


def keep_corpus(key: str, corpus: Corpus, notes: Notes) -> None:
    """Keep a corpus, in place of a damaged entry too.

    Raises:
        OSError, RuntimeError: the cache folder cannot be written, or there is no home directory.
    """
    root = corpora_folder()
    root.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix="unfinished.", dir=root))
    try:
        corpus.save(staged)
        (staged / NOTES).write_text(json.dumps(asdict(notes)))
        (staged / LIST).write_text(json.dumps(sum_files(staged)))
        shutil.rmtree(root / key, ignore_errors=True)
        rename_whole(staged, root / key)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    # What a killed run left unfinished grows old among the others and goes with them.
    entries = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime_ns)
    for path in entries[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)

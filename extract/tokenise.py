"""From data files to a tokenised corpus. Knows nothing of stores or units."""

from __future__ import annotations

from pathlib import Path

from ..store.progress import Listener
from .corpus import Corpus, DataSettings, Notes, build_corpus
from .data import read_rows
from .render import Renderer
from .target import TargetInfo


def tokenise(
    files: list[Path],
    digests: dict[str, str],
    info: TargetInfo,
    renderer: Renderer,
    settings: DataSettings,
    listener: Listener,
) -> tuple[Corpus, Notes]:
    """Read and tokenise data files.

    Args:
        digests: sha256 of each file, by name.

    Raises:
        DataError: a line cannot be used; it is named.
    """
    return build_corpus(read_rows(files), renderer, settings, info.vocab_size)

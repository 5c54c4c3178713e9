"""Where this user keeps what can be made again: tokenised data, measured rates. Knows nothing of what is in it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """This project's folder in the user's cache; it need not exist. Raises RuntimeError: there is no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash"

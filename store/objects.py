"""A store under a prefix of an object store (`s3://bucket/prefix`), through obstore.

Objects cannot be renamed, so a commit is a conditional put: everything else is uploaded first, and the one object whose
presence makes the folder whole is put only if it is not there yet. Credentials and endpoint come from the environment
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`, ...) and from
nowhere else.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from .format import LOCK, STAGING, StoreError

HEARTBEAT = 20.0
"""Seconds between two signs of life of a lock's holder."""
STALE = 120.0
"""Seconds without one after which the holder is taken for dead."""
REQUESTS = 16
"""Bytes arrive in chunks of a few megabytes, each a request; this many are under way at a time."""


def object_place(url: str) -> ObjectPlace:
    """Open a prefix. Raises StoreError when obstore is not installed or the address is not one it knows."""
    try:
        import obstore.store
    except ImportError:
        raise StoreError(f"{url} needs the package obstore: pip install 'dflash-offline[objects]'") from None
    from obstore.exceptions import BaseError

    try:
        options: dict[str, Any] = {"retry_config": {"max_retries": 5}}
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["client_options"] = {"allow_http": True}  # said by whoever set the endpoint
        return ObjectPlace(url.rstrip("/"), obstore.store.from_url(url.rstrip("/"), **options))
    except (BaseError, ValueError) as error:
        raise StoreError(f"{url} cannot be used as a store: {_brief(error)}") from None


class ObjectBlob:
    """An object, read by ranges."""

    block = 8 << 20

    def __init__(self, store: Any, key: str, size: int) -> None:
        self._store, self._key, self.size = store, key, size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the range at `offset`. Raises EOFError."""
        import obstore

        if offset + len(view) > self.size:
            raise EOFError
        with _clear(self._key):
            view[:] = memoryview(obstore.get_range(self._store, self._key, start=offset, length=len(view)))


class ObjectPlace:
    """A prefix of an object store."""

    whole_folders = False
    threads = REQUESTS

    def __init__(self, url: str, store: Any) -> None:
        self._url, self._store = url, store
        self._copies: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def __str__(self) -> str:
        return self._url

    def read(self, key: str) -> bytes:
        """The whole content. Raises FileNotFoundError."""
        import obstore

        with _clear(f"{self}/{key}"):
            return bytes(obstore.get(self._store, key).bytes())

    def open(self, key: str) -> ObjectBlob:
        """Ask for the size. Raises FileNotFoundError."""
        import obstore

        with _clear(f"{self}/{key}"):
            return ObjectBlob(self._store, key, obstore.head(self._store, key)["size"])

    def exists(self, key: str) -> bool:
        """Whether there is an object of exactly that key."""
        try:
            self.open(key)
        except FileNotFoundError:
            return False
        return True

    def folders(self, prefix: str) -> list[str]:
        """Names of the prefixes directly below, sorted."""
        import obstore

        with _clear(f"{self}/{prefix}"):
            found = obstore.list_with_delimiter(self._store, f"{prefix}/" if prefix else None)["common_prefixes"]
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def files(self, prefix: str) -> dict[str, int]:
        """Every object below, by key relative to `prefix`, with its bytes."""
        import obstore

        start = f"{prefix}/" if prefix else ""
        with _clear(f"{self}/{prefix}"):
            found = [meta for page in obstore.list(self._store, start or None) for meta in page]
        return {meta["path"].removeprefix(start): meta["size"] for meta in found}

    def write(self, key: str, content: bytes) -> None:
        """Put the object; a put is atomic."""
        import obstore

        with _clear(f"{self}/{key}"):
            obstore.put(self._store, key, content)

    def stage(self, name: str) -> Path:
        """A temporary folder of this machine (TMPDIR)."""
        return Path(tempfile.mkdtemp(prefix=f"dflash.{name}."))

    def commit(self, staged: Path, key: str, last: str) -> bool:
        """Upload all but `last`, then put that only if it is not there."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        if self.exists(f"{key}/{last}"):
            return False
        start = f"{key}/" if key else ""
        for path in sorted(staged.rglob("*")):
            name = path.relative_to(staged).as_posix()
            if path.is_file() and name != last:
                with _clear(f"{self}/{start}{name}"):
                    obstore.put(self._store, f"{start}{name}", path)
        try:
            with _clear(f"{self}/{start}{last}"):
                obstore.put(self._store, f"{start}{last}", (staged / last).read_bytes(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    def remove(self, prefix: str, last: str) -> None:
        """Delete `last`, then the rest."""
        import obstore

        rest = [f"{prefix}/{name}" for name in self.files(prefix) if name != last]
        with _clear(f"{self}/{prefix}"):
            if len(rest) < len(self.files(prefix)):
                obstore.delete(self._store, f"{prefix}/{last}")
            if rest:
                obstore.delete(self._store, rest)

    def fetch(self, prefix: str) -> Path:
        """A copy in a temporary folder, made once."""
        import obstore

        if prefix not in self._copies:
            copy = tempfile.TemporaryDirectory(prefix="dflash.copy.")
            for name in self.files(prefix):
                path = Path(copy.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with _clear(f"{self}/{prefix}/{name}"), path.open("wb") as file:
                    for piece in obstore.get(self._store, f"{prefix}/{name}").stream():
                        file.write(piece)
            self._copies[prefix] = copy
        return Path(self._copies[prefix].name)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a lock object that is touched every 20 seconds; one left by a killed holder is taken over after 120."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        owner = f"{socket.gethostname()} {os.getpid()} {uuid4().hex}".encode()
        with _clear(f"{self}/{LOCK}"):
            try:
                mark = obstore.put(self._store, LOCK, owner, mode="create")
            except AlreadyExistsError:
                mark = self._take_over(owner)
        ended = threading.Event()

        def live() -> None:
            nonlocal mark
            while not ended.wait(HEARTBEAT):
                try:
                    mark = obstore.put(self._store, LOCK, owner, mode=_version(mark))
                except BaseError:
                    continue  # the next beat may come through; commits are conditional whoever holds the lock

        thread = threading.Thread(target=live, name="dflash-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(FileNotFoundError):  # taken over, which only a long silence allows
                if self.read(LOCK) == owner:
                    obstore.delete(self._store, LOCK)

    def _take_over(self, owner: bytes) -> Any:
        import obstore
        from obstore.exceptions import PreconditionError

        held = obstore.head(self._store, LOCK)
        if (age := (self._now() - held["last_modified"]).total_seconds()) < STALE:
            holder = self.read(LOCK).decode(errors="replace").rpartition(" ")[0]
            raise StoreError(
                f"another command ({holder}) is writing to {self}, its last sign of life {age:.0f} s old: wait for it, "
                f"or, if it was killed, until that is {STALE:.0f} s old"
            )
        try:
            return obstore.put(self._store, LOCK, owner, mode=_version(held))
        except PreconditionError:
            raise StoreError(f"another command took over writing to {self} just now: wait for it") from None

    def _now(self) -> datetime:
        """The time by the server's own clock."""
        import obstore

        probe = f"{STAGING}/clock-{uuid4().hex}"
        obstore.put(self._store, probe, b"")
        now = obstore.head(self._store, probe)["last_modified"]
        obstore.delete(self._store, probe)
        return now

    def zarr_store(self) -> Any:
        """zarr-python's own view of obstore."""
        from zarr.storage import ObjectStore

        return ObjectStore(self._store)


def _version(found: Any) -> Any:
    return {key: found[key] for key in ("e_tag", "version") if found.get(key)}


@contextmanager
def _clear(key: str) -> Iterator[None]:
    """Turn obstore's errors into ours: FileNotFoundError, or one sentence."""
    from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

    try:
        yield
    except (AlreadyExistsError, PreconditionError):
        raise  # answers, not failures
    except (NotFoundError, FileNotFoundError):
        raise FileNotFoundError(key) from None
    except BaseError as error:
        raise StoreError(
            f"{key}: {_brief(error)}; check the address, and the credentials and endpoint in the environment"
        ) from None


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__

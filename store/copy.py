"""Copying a store to another directory or object store: part by part, verified, going on where it stopped.

A part is committed at its new place only after its copy has been read back whole. On an object store reading back comes
after the upload: there a last pass verifies everything. Never writes to the source.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .format import HEAD, PLAN, PLANS, RECORD, StoreError
from .place import Directory, Place, clear_errors, place_of
from .progress import SILENT, Listener
from .reader import Store, open_store
from .verify import check_part, verify
from .writer import create_store

BLOCK = 8 << 20
AT_ONCE = 4
"""Parts under way at a time."""


def copy_store(source: str | Path | Place, target: str | Path | Place, listener: Listener = SILENT) -> Store:
    """Copy a store. Returns the copy, opened.

    Args:
        listener: progress counts tokens.

    Raises:
        StoreError: the target holds something else than a copy of this store, a part is damaged (it is named; the parts
            before it stand), or there is no room or no leave to write.
    """
    store, place = open_store(source), place_of(target)
    if str(place) == str(store.place):
        raise StoreError(f"{place} cannot be copied to itself: give another path")
    copy = create_store(place, store.identity, lambda folder: _copy_tree(store.place, HEAD, folder), store.parts_folder)
    if copy.parts_folder != store.parts_folder:
        raise StoreError(f"{place} is a copy of another generation of {store.place}: copy to a new path")
    with place.hold():
        for plan in store.place.folders(PLANS):
            _copy_folder(store.place, place, f"{PLANS}/{plan}", PLAN)
        listener.start(store.tokens, 0)
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dflash-copy")
        try:
            jobs = {pool.submit(_copy_part, store, place, part.id): part for part in store.parts}
            for job in as_completed(jobs):
                job.result()
                listener.advance(jobs[job].tokens, jobs[job].id)
        finally:
            pool.shutdown(cancel_futures=True)
        copy.refresh()
        copy.write_index()
    if not place.whole_folders and (problems := verify(place).problems):
        raise StoreError(f"the copy is not whole: {problems[0]}; delete that part of it and copy again")
    return copy


def _copy_part(store: Store, target: Place, name: str) -> None:
    key = f"{store.parts_folder}/{name}"
    if target.exists(f"{key}/{RECORD}"):
        # The record sums all that the part consists of.
        if target.read(f"{key}/{RECORD}") != store.place.read(f"{key}/{RECORD}"):
            raise StoreError(f"{target} has another part {name} than {store.place}: copy to a new path")
        return
    if isinstance(store.place, Directory) and not isinstance(target, Directory):
        if problems := check_part(store.place, key, store.identity):
            raise StoreError(f"{problems[0]}; it was not copied")
        target.commit(store.place.path / key, key, RECORD)
        return
    staged = target.stage(name)
    try:
        # Below a folder of its own name, which is part of what is checked.
        _copy_tree(store.place, key, staged / name)
        if problems := check_part(Directory(staged), name, store.identity):
            raise StoreError(f"part {name} of {store.place} was not copied: {problems[0]}")
        target.commit(staged / name, key, RECORD)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _copy_folder(source: Place, target: Place, key: str, last: str) -> None:
    staged = target.stage("copy")
    try:
        _copy_tree(source, key, staged / "copy")
        target.commit(staged / "copy", key, last)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _copy_tree(source: Place, key: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(BLOCK))
    for name, size in source.files(key).items():
        path = folder / name
        blob = source.open(f"{key}/{name}")
        with clear_errors(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                for at in range(0, size, BLOCK):
                    piece = buffer[: min(BLOCK, size - at)]
                    blob.read_into(piece, at)
                    while piece:
                        piece = piece[file.write(piece) or 0 :]

"""What the system refuses: a full disk, a read-only mount, missing permissions. One sentence, and the store opens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stores import filled_store, new_store, small_disk, write_part

from dflash_offline.store import StoreError, lock_store, open_store
from dflash_offline.store.copy import copy_store
from dflash_offline.store.prune import prune, pruned_identity
from dflash_offline.store.verify import verify

TESTS = str(Path(__file__).parent.parent)

FILL = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from stores import write_part
from dflash_offline.store import StoreError, lock_store, open_store
{limit}
store = open_store(sys.argv[1])
try:
    with lock_store(sys.argv[1]):
        for number in range(3, 400):
            write_part(store, f"t-{{number:03d}}", seed=number)
except StoreError as error:
    print(error)
    sys.exit(7)
"""


def fill(path: Path, limit: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Write parts in a process of its own until something refuses."""
    command = [*before, sys.executable, "-c", FILL.format(limit=limit), str(path), TESTS]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_file_that_may_not_grow_stops_the_run_and_the_store_opens(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    done = fill(tmp_path / "s", "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))")
    assert done.returncode == 7, done.stderr
    assert "no room is left for the store" in done.stdout
    assert verify(tmp_path / "s").problems == []
    assert list((tmp_path / "s/meta/staging").iterdir()) == []


def test_a_full_disk_stops_the_run_and_the_store_opens(tmp_path: Path) -> None:
    if not small_disk(tmp_path):
        pytest.skip("mounting needs user namespaces")
    script = f"""
mount -t tmpfs -o size=4m none {tmp_path}
"{sys.executable}" -c "
import sys; sys.path.insert(0, '{TESTS}')
from stores import filled_store
filled_store('{tmp_path}/s')"
"$@"
echo "left $?"
"{sys.executable}" -c "
from dflash_offline.store import open_store
from dflash_offline.store.verify import verify
store = open_store('{tmp_path}/s')
print(len(store.parts), 'parts,', len(verify(store.place).problems), 'problems')"
"""
    done = fill(tmp_path / "s", "", "unshare", "-rm", "sh", "-c", script, "sh")
    assert "no room is left for the store" in done.stdout, done.stderr
    assert "left 7" in done.stdout
    assert "parts, 0 problems" in done.stdout


AS_NOBODY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become nobody")


def as_nobody(path: Path, script: str) -> str:
    """Run a script as a user without permissions here; returns what it printed."""
    for folder in [path, *path.parents]:
        if str(folder).startswith("/tmp/pytest"):
            folder.chmod(0o755)
    code = f"""
import os, sys
sys.path.insert(0, {TESTS!r})
from stores import new_store, write_part
from dflash_offline.store import StoreError, lock_store, open_store
from dflash_offline.store.prune import prune, pruned_identity
from dflash_offline.store.verify import verify
import torch, zarr
os.setgid(65534); os.setuid(65534)
path = {str(path)!r}
try:
    {script}
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


@AS_NOBODY
@pytest.mark.parametrize(
    "script",
    [
        "write_part(open_store(path), 't-9')",
        "lock_store(path).__enter__()",
        "prune(path, pruned_identity(open_store(path).identity, fp8=True))",
        "new_store(path + '/inner')",
        "open_store(path).write_index()",
    ],
)
def test_missing_permissions_are_said(tmp_path: Path, script: str) -> None:
    filled_store(tmp_path / "s")
    said = as_nobody(tmp_path / "s", script)
    assert "cannot write to the store" in said
    assert "Permission denied" in said
    assert verify(tmp_path / "s").problems == []


@AS_NOBODY
def test_reading_needs_no_leave_to_write(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    assert as_nobody(tmp_path / "s", "print(len(verify(path).problems), open_store(path).tokens)") == "0 981\n"


@AS_NOBODY
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    (tmp_path / "s/parts/t-1/hidden/c/0/0/0").chmod(0o600)
    said = as_nobody(tmp_path / "s", "print(verify(path).problems)")
    assert "t-1/hidden/c/0/0/0: Permission denied" in said


def test_a_read_only_mount_is_said(tmp_path: Path) -> None:
    if not small_disk(tmp_path):
        pytest.skip("mounting needs user namespaces")
    filled_store(tmp_path / "s")
    script = f'mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path} && "$@"'
    done = fill(tmp_path / "s", "", "unshare", "-rm", "sh", "-c", script, "sh")
    assert "cannot write to the store" in done.stdout, done.stderr
    assert "Read-only" in done.stdout


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "inner", tmp_path / "file"):
        with pytest.raises(StoreError):
            new_store(path)
        with pytest.raises(StoreError):
            copy_store(tmp_path / "s", path)
    with lock_store(tmp_path / "s"), pytest.raises(StoreError):
        prune(store.place, pruned_identity(store.identity, fp8=True))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "s"]
    assert write_part(open_store(tmp_path / "s"), "t-9")

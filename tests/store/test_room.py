"""Room on a disk: a real one of 4 MB, and object stores, which do not say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stores import small_disk

from dflash_offline.store import StoreError, place_of
from dflash_offline.store.room import check_writable, room_left

PROGRAM = """
import sys
from pathlib import Path
from dflash_offline.store import place_of
from dflash_offline.store.room import free_space, room_left
place = place_of(sys.argv[1] + "/not/there/yet")
for fill in range(3):
    print(free_space(place), room_left(place))
    Path(sys.argv[1], str(fill)).write_bytes(bytes(2 << 20) if fill == 0 else bytes(free_space(place)))
"""


def test_room_on_a_small_disk(tmp_path: Path) -> None:
    if not small_disk(tmp_path):
        pytest.skip("mounting needs user namespaces")
    script = f'mount -t tmpfs -o size=4m none {tmp_path} && "{sys.executable}" -c "$0" {tmp_path}'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script, PROGRAM], capture_output=True, text=True, check=True)
    reserve = (4 << 20) // 100
    empty, half, full = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert empty == (4 << 20, (4 << 20) - reserve)
    assert half == (2 << 20, (2 << 20) - reserve)
    assert full == (0, 0)


def test_object_stores_do_not_say(prefix: str) -> None:
    assert room_left(place_of(prefix)) is None
    check_writable(place_of(prefix))


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(place_of(tmp_path / "new" / "states"))
    with pytest.raises(StoreError, match="is a file; give another"):
        check_writable(place_of(tmp_path / "file" / "states"))

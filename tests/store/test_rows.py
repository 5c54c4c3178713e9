"""Shard files: our reader and zarr-python agree with what was written, and every kind of damage is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_offline.store import StoreError, rows
from dflash_offline.store.rows import RowsReader, RowsWriter


def write(folder: Path, data: np.ndarray, pieces: list[int]) -> np.ndarray:
    """Write `[n, layers, H]` or `[n, H]` in pieces of the given sizes; returns the checksums."""
    layers = data.shape[1] if data.ndim == 3 else None
    writer = RowsWriter(zarr.create_group(str(folder)), folder, "hidden", len(data), layers, data.shape[-1])
    at = 0
    for size in [*pieces, len(data)]:
        writer.append(data[at : at + size])
        at = min(len(data), at + size)
    return writer.close()


def states(count: int, layers: int | None, width: int, seed: int = 0) -> np.ndarray:
    shape = (count, width) if layers is None else (count, layers, width)
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)


@given(
    count=st.integers(1, 1400),
    layers=st.sampled_from([None, 1, 3]),
    pieces=st.lists(st.integers(0, 500), max_size=6),
    shard_chunks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_readers_see_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    layers: int | None,
    pieces: list[int],
    shard_chunks: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    data = states(count, layers, 8, seed)
    monkeypatch.setattr(rows, "SHARD_BYTES", shard_chunks * 256 * (layers or 1) * 16)  # several shards
    checksums = write(folder, data, pieces)
    assert np.array_equal(np.asarray(zarr.open_array(str(folder / "hidden"), mode="r")[...]), data)

    reader = RowsReader(folder / "hidden", checksums)
    rng = np.random.default_rng(seed)
    flat = data.reshape(count, layers or 1, 8)
    for _ in range(4):
        start = int(rng.integers(0, count))
        stop = int(rng.integers(start, count)) + 1
        wanted = tuple(int(x) for x in rng.permutation(layers or 1)[: rng.integers(1, (layers or 1) + 1)])
        out = np.zeros((len(wanted), stop - start, 8), np.uint16)
        reader.read(start, stop, wanted, out)
        assert np.array_equal(out, flat[start:stop, list(wanted)].swapaxes(0, 1))
    reader.close()


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, np.ndarray, Path]:
    checksums = write(tmp_path, states(600, 2, 16), [])
    return tmp_path / "hidden", checksums, tmp_path / "hidden" / "c" / "0" / "0" / "0"


def read_all(array: Path, checksums: np.ndarray) -> None:
    out = np.zeros((2, 600, 16), np.uint16)
    RowsReader(array, checksums).read(0, 600, (0, 1), out)


def test_a_flipped_bit_is_named(shard: tuple[Path, np.ndarray, Path]) -> None:
    array, checksums, file = shard
    content = bytearray(file.read_bytes())
    content[256 * 16 * 2 + 5] ^= 4  # in chunk 0 of layer index 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="chunk 0, layer index 1"):
        read_all(array, checksums)


@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_a_truncated_shard_is_an_error(shard: tuple[Path, np.ndarray, Path], kept: float) -> None:
    array, checksums, file = shard
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept) if 0 < kept < 1 else int(kept)])
    with pytest.raises(StoreError, match="damaged"):
        read_all(array, checksums)


def test_a_zeroed_tail_is_an_error(shard: tuple[Path, np.ndarray, Path]) -> None:
    array, checksums, file = shard
    content = file.read_bytes()
    file.write_bytes(content[:-500] + bytes(500))
    with pytest.raises(StoreError, match="damaged"):
        read_all(array, checksums)


def test_a_deleted_shard_is_an_error(shard: tuple[Path, np.ndarray, Path]) -> None:
    array, checksums, file = shard
    file.unlink()
    with pytest.raises(StoreError, match="missing"):
        read_all(array, checksums)


def test_rows_must_add_up(tmp_path: Path) -> None:
    writer = RowsWriter(zarr.create_group(str(tmp_path)), tmp_path, "hidden", 10, None, 4)
    writer.append(states(9, None, 4))
    with pytest.raises(StoreError, match="9 rows were written where 10 were due"):
        writer.close()

"""Shard files: our reader and zarr-python agree with what was written, and every kind of damage is an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.codecs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import bits_of

from dflash_offline.store import States, StoreError, place_of, row_writer
from dflash_offline.store.foreign import ZarrRows
from dflash_offline.store.format import Encoding
from dflash_offline.store.fp8 import decode_bits, encode_bits
from dflash_offline.store.row_reader import RowsReader, ShardRows, open_rows, pieces
from dflash_offline.store.row_writer import RowsWriter
from dflash_offline.store.states import empty_states


def write(folder: Path, states: States, sizes: list[int], encoding: Encoding = "bf16") -> np.ndarray:
    """Write `[layers, n, H]` in pieces of the given sizes, without an axis of layers if there is one."""
    layers, count, width = states.values.shape
    group = zarr.create_group(str(folder))
    with ThreadPoolExecutor(2) as pool:
        writer = RowsWriter(group, folder, "hidden", count, None if layers == 1 else layers, width, encoding, pool)
        at = 0
        for size in [*sizes, count]:
            writer.append(states.rows(at, min(count, at + size)))
            at = min(count, at + size)
        return writer.close()


def read(reader: RowsReader, start: int, stop: int, layers: tuple[int, ...], encoding: Encoding = "bf16") -> States:
    out = empty_states(encoding, len(layers), stop - start, 8)
    for piece in pieces(reader, start, stop, layers, out):
        piece.read()
    return out


def through_zarr(folder: Path) -> np.ndarray:
    """The whole array as zarr-python reads it, `[layers, n, H]`."""
    found = np.asarray(zarr.open_array(str(folder / "hidden"), mode="r")[...])
    return found[None] if found.ndim == 2 else found.swapaxes(0, 1)


@given(
    count=st.integers(1, 1400),
    layers=st.sampled_from([1, 3]),
    sizes=st.lists(st.integers(0, 700), max_size=6),
    shard_chunks=st.integers(1, 4),
    encoding=st.sampled_from(["bf16", "fp8"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_readers_see_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    layers: int,
    sizes: list[int],
    shard_chunks: int,
    encoding: Encoding,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    plain = bits_of(seed, layers, count, 8)
    stored = States(plain) if encoding == "bf16" else encode_bits(plain)
    expected = plain if encoding == "bf16" else decode_bits(stored)
    monkeypatch.setattr(row_writer, "SHARD_BYTES", shard_chunks * 256 * layers * 16)  # several shards
    checksums = write(folder, stored, sizes, encoding)
    assert np.array_equal(through_zarr(folder), expected)

    place = place_of(folder)
    fast = open_rows(place, "hidden", checksums, encoding)
    assert isinstance(fast, ShardRows)
    readers: list[RowsReader] = [fast]
    if encoding == "bf16":
        readers.append(ZarrRows(place, "hidden", checksums, encoding))
    rng = np.random.default_rng(seed)
    for _ in range(4):
        start = int(rng.integers(0, count))
        stop = int(rng.integers(start, count)) + 1
        wanted = tuple(int(x) for x in rng.permutation(layers)[: rng.integers(1, layers + 1)])
        for reader in readers:
            for _ in range(2):  # at first touch, and once checked
                found = read(reader, start, stop, wanted, encoding)
                assert np.array_equal(found.values, stored.values[list(wanted), start:stop])
                if stored.scales is not None:
                    assert found.scales is not None
                    assert np.array_equal(found.scales, stored.scales[list(wanted), start:stop])


@pytest.mark.parametrize(
    "change", [{"compressors": [zarr.codecs.ZstdCodec()]}, {"chunks": (100, 1, 8), "shards": None}]
)
def test_an_array_laid_out_otherwise_is_read_through_zarr(tmp_path: Path, change: dict[str, Any]) -> None:
    plain = bits_of(5, 3, 700, 8)
    checksums = write(tmp_path / "ours", States(plain), [])
    group = zarr.create_group(str(tmp_path / "theirs"))
    layout: dict[str, Any] = {"chunks": (256, 1, 8), "shards": (768, 3, 8), **change}
    group.create_array("hidden", data=np.ascontiguousarray(plain.swapaxes(0, 1)), **layout)
    reader = open_rows(place_of(tmp_path / "theirs"), "hidden", checksums, "bf16")
    assert isinstance(reader, ZarrRows)
    assert np.array_equal(read(reader, 100, 650, (2, 0)).values, plain[[2, 0], 100:650])

    for chunk in (tmp_path / "theirs/hidden/c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()  # zarr-python would read zeros
    with pytest.raises(StoreError, match="damaged or missing"):
        read(open_rows(place_of(tmp_path / "theirs"), "hidden", checksums, "bf16"), 0, 700, (0,))


def test_rows_go_into_contiguous_memory_only(shard: tuple[Path, np.ndarray, Path]) -> None:
    array, checksums, _ = shard
    reader = open_rows(place_of(array), "hidden", checksums, "bf16")
    with pytest.raises(ValueError, match="contiguous"):
        reader.read_piece(0, 0, 0, 8, States(np.zeros((1, 8, 32), np.uint16)[:, :, ::2]))


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, np.ndarray, Path]:
    checksums = write(tmp_path, States(bits_of(0, 2, 600, 16)), [])
    return tmp_path, checksums, tmp_path / "hidden" / "c" / "0" / "0" / "0"


def read_everything(folder: Path, checksums: np.ndarray) -> None:
    reader = open_rows(place_of(folder), "hidden", checksums, "bf16")
    for chunk in range(3):
        for layer in range(2):
            reader.check(chunk, layer)


@pytest.mark.parametrize("row", [0, 5, 255])
def test_a_flipped_bit_is_named_wherever_it_is(shard: tuple[Path, np.ndarray, Path], row: int) -> None:
    folder, checksums, file = shard
    content = bytearray(file.read_bytes())
    content[(256 + row) * 16 * 2 + 5] ^= 4  # in chunk 0 of layer index 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="chunk 0, layer index 1"):
        read_everything(folder, checksums)
    # Rows far from the damage are refused too: at first touch a chunk is good as a whole or not at all.
    out = States(np.zeros((1, 1, 16), np.uint16))
    with pytest.raises(StoreError, match="chunk 0, layer index 1"):
        open_rows(place_of(folder), "hidden", checksums, "bf16").read_piece(0, 1, 100, 101, out)


@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_a_truncated_shard_is_an_error(shard: tuple[Path, np.ndarray, Path], kept: float) -> None:
    folder, checksums, file = shard
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept) if 0 < kept < 1 else int(kept)])
    with pytest.raises(StoreError, match="damaged"):
        read_everything(folder, checksums)


def test_a_zeroed_tail_is_an_error(shard: tuple[Path, np.ndarray, Path]) -> None:
    folder, checksums, file = shard
    content = file.read_bytes()
    file.write_bytes(content[:-500] + bytes(500))
    with pytest.raises(StoreError, match="damaged"):
        read_everything(folder, checksums)


def test_a_shard_cut_after_it_was_opened_is_an_error(shard: tuple[Path, np.ndarray, Path]) -> None:
    folder, checksums, file = shard
    reader = open_rows(place_of(folder), "hidden", checksums, "bf16")
    reader.check(0, 0)
    with file.open("r+b") as handle:
        handle.truncate(100)
    with pytest.raises(StoreError, match="cut short"):
        reader.check(2, 1)


def test_a_deleted_shard_is_an_error(shard: tuple[Path, np.ndarray, Path]) -> None:
    folder, checksums, file = shard
    file.unlink()
    with pytest.raises(StoreError, match="missing"):
        read_everything(folder, checksums)


def test_rows_must_add_up(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        writer = RowsWriter(zarr.create_group(str(tmp_path)), tmp_path, "hidden", 10, None, 4, "bf16", pool)
        writer.append(States(bits_of(0, 1, 9, 4)))
        with pytest.raises(StoreError, match="9 rows were written where 10 were due"):
            writer.close()

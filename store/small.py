"""The small arrays of a part (tokens, offsets, ids, checksums): one chunk each, with Zarr's own crc32c at its end.

Read here without zarr-python, which takes a millisecond to open an array: a run opens thousands. Anything laid out
otherwise goes through it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from crc32c import crc32c

from .format import StoreError
from .place import Place

DTYPES = {"bool": "?", "int32": "<i4", "int64": "<i8", "uint32": "<u4", "uint64": "<u8"}


def read_small(place: Place, key: str) -> tuple[np.ndarray, dict[str, Any]]:
    """A small array and its attributes.

    Raises:
        StoreError: it is missing or damaged.
    """
    try:
        metadata = json.loads(place.read(f"{key}/zarr.json"))
        if not _is_plain(metadata):
            return _through_zarr(place, key), metadata.get("attributes", {})
        shape = metadata["shape"]
        content = place.read(f"{key}/c/{'/'.join(['0'] * len(shape))}")
    except FileNotFoundError as error:
        raise StoreError(f"{place}/{key} has lost {error.filename or error}: the part is not whole") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{place}/{key} cannot be read ({error}): the part is not whole") from None
    data, checksum = content[:-4], content[-4:]
    dtype = np.dtype(DTYPES[metadata["data_type"]])
    count = int(np.prod(shape))
    if crc32c(data) != int.from_bytes(checksum, "little") or len(data) != max(count, 1) * dtype.itemsize:
        raise StoreError(f"{place}/{key} does not agree with its checksum: the file is damaged")
    return np.frombuffer(data, dtype, count).reshape(shape), metadata.get("attributes", {})


def _is_plain(metadata: dict[str, Any]) -> bool:
    chunk = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    return (
        metadata["data_type"] in DTYPES
        and chunk == [max(1, n) for n in metadata["shape"]]
        and [codec["name"] for codec in metadata["codecs"]] == ["bytes", "crc32c"]
        and metadata["codecs"][0].get("configuration", {}).get("endian", "little") == "little"
        and metadata["chunk_key_encoding"]["name"] == "default"
        and metadata["chunk_key_encoding"].get("configuration", {}).get("separator", "/") == "/"
    )


def _through_zarr(place: Place, key: str) -> np.ndarray:
    import zarr

    array = zarr.open_array(place.zarr_store(), path=key, mode="r")
    found = place.files(f"{key}/c")
    chunks = int(np.prod([-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]))
    if len(found) != chunks:  # zarr-python reads a chunk that is not there as zeros; here that is damage
        raise StoreError(f"{place}/{key} has lost chunks: the part is not whole")
    return np.asarray(array[...])

"""What a store's text is made of: documents and tokens by split, by tag and by length.

From the index alone; no state is read. Returns plain dictionaries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .format import HELDOUT, TRAIN
from .reader import Store, stored_bytes


def store_info(store: Store) -> dict[str, Any]:
    """Documents, tokens, bytes, tags and identity, from the parts' records. Parts that are lost count, and are said."""
    parts = [*store.parts, *store.lost]
    tags: dict[str, int] = {}
    for part in parts:
        for tag, count in part.tags.items():
            tags[tag] = tags.get(tag, 0) + count
    splits = {
        split: {
            "documents": sum(part.documents for part in parts if part.split == split),
            "tokens": sum(part.tokens for part in parts if part.split == split),
            "supervised_tokens": sum(part.supervised for part in parts if part.split == split),
        }
        for split in (TRAIN, HELDOUT)
    }
    return {
        "path": str(store.place),
        "parts": len(parts),
        "lost_parts": [part.id for part in store.lost],
        "splits": splits,
        "bytes": stored_bytes(store.identity, sum(part.tokens for part in parts)),
        "tags": dict(sorted(tags.items())),
        "identity": store.identity.model_dump(mode="json"),
    }


def store_stats(store: Store) -> dict[str, Any]:
    """Documents and tokens by tag and by length, for each split and together.

    Lengths are counted by doubling: up to 128 tokens, 129 to 256, and so on.
    """
    found: dict[str, Any] = {"path": str(store.place), "splits": {}}
    columns = {split: store.documents(split) for split in (TRAIN, HELDOUT)}
    for split, documents in columns.items():
        found["splits"][split] = {"documents": len(documents), "tokens": int(documents.length.sum())}
    length = np.concatenate([documents.length for documents in columns.values()])
    tags = np.array([tag for documents in columns.values() for tag in documents.tags], object)
    found["documents"], found["tokens"] = len(length), int(length.sum())
    some = length if len(length) else np.zeros(1, np.int64)
    found["shortest"], found["median"], found["longest"] = int(some.min()), int(np.median(some)), int(some.max())
    found["tags"] = [_counts({"tag": tag}, length[tags == tag], found["tokens"]) for tag in sorted(set(tags.tolist()))]
    found["tags"].sort(key=lambda row: -row["tokens"])
    found["lengths"] = []
    low, high = 1, 128
    while low <= found["longest"]:
        inside = length[(length >= low) & (length <= high)]
        found["lengths"].append(_counts({"from": low, "to": high}, inside, found["tokens"]))
        low, high = high + 1, high * 2
    return found


def _counts(name: dict[str, Any], length: np.ndarray, total: int) -> dict[str, Any]:
    tokens = int(length.sum())
    return {**name, "documents": len(length), "tokens": tokens, "share": tokens / total if total else 0.0}

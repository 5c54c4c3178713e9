"""What a store is made of: names, shapes, the identity of a store and the record of a part.

The page `docs/store.md` describes the same format for people. Nothing here touches a disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

FORMAT = 2
CHUNK_TOKENS = 256
"""Rows of one chunk: 256 tokens of one layer."""
SHARD_BYTES = 1 << 30
"""Upper bound on the data of one shard file."""

HELDOUT = "heldout"
TRAIN = "train"

ROOT_KEY = "dflash"
"""The attribute, of the root group and of each part, that holds what this project writes."""
FILES_KEY = "dflash_files"
"""The attribute that lists what else belongs to a part or to the store: size and sha256 of each file."""
SEAL_KEY = "dflash_seal"
"""The attribute with the crc32c of the two above."""
PARTS = "parts"
"""Folder of the committed parts in a new store; after `prune` the root names another, `parts-1` and so on."""
META = "meta"
RECORD = "zarr.json"
"""A group's own file. It is committed last, and holds the record in its attributes."""
MANIFEST = "meta/manifest.json"
DOCUMENTS = "meta/documents.safetensors"
HEAD = "meta/head"
STAGING = "meta/staging"
PLANS = "meta/plans"
PLAN = "plan.json"
"""In the folder of a plan: units, and under `tokens` how many each split will have from them."""
LOCK = "meta/extract.lock"


Encoding = Literal["bf16", "fp8"]


class DflashError(Exception):
    """Something a person can put right; the message is one sentence that names the thing and the remedy."""


class StoreError(DflashError):
    """A store that is missing, damaged, of another kind, or made for another target; the message is for people."""


class StoreFullError(StoreError):
    """No room is left where the store lies: going on with other parts would fail too."""


class Identity(BaseModel):
    """What must match to extend a store or to train from it. Hashes are hexadecimal sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    target_weights: str
    target_config: str
    tokenizer: str
    chat_template: str
    rendering: str
    """How the chat template was called, e.g. `enable_thinking=false`."""
    max_length: int
    layer_ids: tuple[int, ...]
    last_layer: Literal["pre", "post"] | None = None
    final: bool
    dtype: Literal["float32", "bfloat16", "fp8"]
    """What the target computed in (fp8: bfloat16, with matrix products in e4m3); the states are kept in `encoding`."""
    encoding: Encoding = "bf16"
    hidden_size: int
    num_layers: int
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        """A hash of all of it: 16 hexadecimal digits, the same for stores whose states compare."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def differences(self, other: Identity, here: str = "here", there: str = "there") -> list[str]:
        """The fields in which `other` differs, each as `field: ours HERE, theirs THERE`; empty when there is none."""
        found = []
        for field in type(self).model_fields:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                found.append(f"{field}: {_short(ours)} {here}, {_short(theirs)} {there}")
        return found


class PartRecord(BaseModel):
    """What the manifest says of one committed part; kept in the part's own attributes too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    split: Literal["heldout", "train"]
    documents: int
    tokens: int
    supervised: int
    tags: dict[str, int]
    """Documents by tag of origin."""
    plan: str
    provenance: dict[str, str]


def part_id(split: str, number: int, documents: Iterable[int]) -> str:
    """The name of a part: its split, its place in the plan and a hash of its documents' ids.

    Held-out parts sort first, so a manifest ordered by name lists them first.
    """
    digest = hashlib.sha256(b"".join(int(d).to_bytes(8, "little") for d in documents)).hexdigest()[:12]
    return f"{'h' if split == HELDOUT else 't'}-{number:06d}-{digest}"


def _short(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text[:12] + "…" if len(text) == 64 else text

"""The hidden-state store: its format, its writer, its reader, and the packed batches a trainer reads from it.

Knows nothing of targets, drafters or training. Both stages import it; it imports neither.
"""

from .batches import Batch, BatchStream, pack
from .format import HELDOUT, TRAIN, DflashError, Identity, PartRecord, StoreError, part_id
from .head import Head, load_head
from .reader import Documents, Store, open_store
from .writer import PartWriter, create_store, existing_store, lock_store, write_manifest

__all__ = [
    "HELDOUT",
    "TRAIN",
    "Batch",
    "BatchStream",
    "DflashError",
    "Documents",
    "Head",
    "Identity",
    "PartRecord",
    "PartWriter",
    "Store",
    "StoreError",
    "create_store",
    "existing_store",
    "load_head",
    "lock_store",
    "open_store",
    "pack",
    "part_id",
    "write_manifest",
]

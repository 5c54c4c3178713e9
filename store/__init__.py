"""The hidden-state store: its format, its writer, its reader, and the packed batches a trainer reads from it.

Knows nothing of targets, drafters or training. Both stages import it; it imports neither. Opening a store loads neither
torch nor zarr-python, so that looking into one is quick.
"""

from .batches import check_shares, mixed, pack, share, shuffled
from .format import HELDOUT, TRAIN, DflashError, Identity, PartRecord, StoreError, StoreFullError, part_id
from .head import Head, load_head
from .place import Place, place_of
from .prefetch import Batch, BatchStream, Fetcher
from .reader import Documents, Store, open_store
from .states import States
from .writer import PartWriter, create_store, existing_store, lock_store

__all__ = [
    "HELDOUT",
    "TRAIN",
    "Batch",
    "BatchStream",
    "DflashError",
    "Documents",
    "Fetcher",
    "Head",
    "Identity",
    "PartRecord",
    "PartWriter",
    "Place",
    "States",
    "Store",
    "StoreError",
    "StoreFullError",
    "check_shares",
    "create_store",
    "existing_store",
    "load_head",
    "lock_store",
    "mixed",
    "open_store",
    "pack",
    "part_id",
    "place_of",
    "share",
    "shuffled",
]

"""What a run refuses before it begins: settings, store and device that do not fit together. Reads, changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from ..store import TRAIN, Documents, Head, Store, StoreError, check_shares
from .drafter import DrafterSettings
from .journal import TrainError
from .kernels.products import MULTIPLE
from .loss import LossSettings
from .settings import TrainSettings


def check_run(
    store: Store,
    head: Head,
    drafter: DrafterSettings,
    loss: LossSettings,
    settings: TrainSettings,
    device: torch.device,
) -> None:
    """All that can be told without beginning: the layers, the mask token, the states, the documents, the widths.

    Raises:
        StoreError: the store has not what the run needs.
        TrainError: fp8 does not fit the GPU or the widths.
    """
    store.layer_indices(tuple(drafter.layer_ids))
    check_mask_token(drafter, store, head)
    check_final(store, loss)
    documents = store.documents(TRAIN)
    check_documents(store, documents, settings.tokens)
    if settings.mixture:
        check_shares(documents, settings.mixture)
    if settings.dtype == "fp8":
        check_fp8(drafter, store, device)


def check_documents(store: Store, documents: Documents, tokens: int) -> None:
    """There are documents, and each fits a batch of that many tokens. Raises StoreError."""
    if not len(documents):
        raise StoreError(f"the store {store.place} has no training documents yet")
    longest = int(documents.length.argmax())
    if documents.length[longest] > tokens:
        raise StoreError(
            f"document {documents.ids[longest]:016x} of part {store.parts[documents.part[longest]].id} has "
            f"{documents.length[longest]} tokens, more than train.tokens = {tokens}: raise that"
        )


def check_final(store: Store, loss: LossSettings) -> None:
    """The store has the states that the loss compares with. Raises StoreError."""
    if loss.needs_final and not store.identity.final:
        raise StoreError(
            f"the store {store.place} keeps no final states, which this loss compares with: extract with "
            "extract.final = true, or use cross_entropy alone"
        )


def check_mask_token(drafter: DrafterSettings, store: Store, head: Head) -> None:
    """The mask token is in the vocabulary, and means nothing else. Raises StoreError."""
    mask = drafter.mask_token_id
    if mask >= store.identity.vocab_size:
        raise StoreError(f"drafter.mask_token_id {mask} is outside the vocabulary of {store.identity.vocab_size}")
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if mask in head.special_ids(name):
            raise StoreError(f"drafter.mask_token_id {mask} is the target's {name}: choose an id the target never uses")


def check_fp8(drafter: DrafterSettings, store: Store, device: torch.device) -> None:
    """fp8 products run on this GPU and take these widths. Raises TrainError."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise TrainError(
            f"train.dtype = fp8 needs a GPU with fp8 matrix units (compute capability 8.9), and {device} is older: "
            "use bfloat16"
        )
    head = drafter.head_dim
    widths = {
        "the target's hidden size": store.identity.hidden_size,
        "the target's vocabulary": store.identity.vocab_size,
        "drafter.intermediate_size": drafter.intermediate_size,
        "drafter.num_attention_heads x head_dim": drafter.num_attention_heads * head,
        "drafter.num_key_value_heads x head_dim": drafter.num_key_value_heads * head,
    }
    for name, width in widths.items():
        if width % MULTIPLE:
            raise TrainError(f"train.dtype = fp8 needs widths that are multiples of {MULTIPLE}; {name} is {width}")


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs from the settings a checkpoint was made with, in words."""
    fields = TrainSettings.model_fields.items()
    defaults = {"train": {name: field.get_default(call_default_factory=True) for name, field in fields}}
    found = []
    for section in now:
        if section not in before:
            found.append(f"an earlier version of dflash wrote it, without [{section}]")
            continue
        for key, value in now[section].items():
            # What an earlier version had no setting for, it did as is the default now.
            old = before[section].get(key, defaults.get(section, {}).get(key))
            if old != value:
                found.append(f"{section}.{key} was {old}, now {value}")
    return found

"""What a drafter needs of the target besides states: embedding, LM head, config, tokenizer and chat template.

Kept inside the store, so that stage two never opens the target's own weights. Knows files and tensors only.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .format import HEAD, StoreError
from .reader import Store

if TYPE_CHECKING:
    import torch  # loaded where tensors are read: looking into a store need not wait for it

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
WEIGHTS = "head.safetensors"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Head:
    """The target's ends, as stored.

    Attributes:
        embedding: `[vocabulary, H]`, in the target's own dtype.
        lm_head: `[vocabulary, H]`; the same tensor as `embedding` when the target ties them.
        config: the target's text config.
        folder: where config, tokenizer and chat template lie, loadable as a transformers tokenizer.
    """

    embedding: torch.Tensor
    lm_head: torch.Tensor
    config: dict[str, Any]
    folder: Path

    def special_ids(self, name: str) -> set[int]:
        """Ids of a special token (`eos_token_id`, ...) as the config or the generation config says them."""
        found: set[int] = set()
        path = self.folder / "generation_config.json"
        for config in (self.config, json.loads(path.read_text()) if path.is_file() else {}):
            said = config.get(name)
            found |= {said} if isinstance(said, int) else set(said or [])
        return found


def save_head(folder: Path, target: Path, embedding: torch.Tensor, lm_head: torch.Tensor | None) -> None:
    """Write a head folder from a target's folder and its two matrices (`lm_head` None: tied to the embedding)."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors = {EMBEDDING: embedding.contiguous()}
    if lm_head is not None:
        tensors[LM_HEAD] = lm_head.contiguous()
    save_file(tensors, folder / WEIGHTS)
    for name in SIDE_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)


def load_head(store: Store) -> Head:
    """Load the head of a store, on the CPU.

    Raises:
        StoreError: the head is missing or has not both ends.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = store.place.fetch(HEAD)
    try:
        tensors = load_file(folder / WEIGHTS)
        config = json.loads((folder / "config.json").read_text())
        embedding = tensors[EMBEDDING]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise StoreError(f"{folder} is not whole ({error}): copy it again, or extract anew") from None
    return Head(embedding, tensors.get(LM_HEAD, embedding), config.get("text_config", config), folder)

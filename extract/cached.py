"""A target that decodes with a cache which can go back: what speculative decoding needs of it.

Keys and values of full attention are cut by keeping the old tensors; the recurrent and convolution states of linear
attention, which are overwritten in place, are copied at each mark. Knows nothing of drafters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from .capture import StateCapture


class CachedTarget:
    """Wraps a loaded causal LM.

    Args:
        model: from `capture.load_model`.
        layer_ids, last_layer: which states `advance` returns, as in the store's identity.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int], last_layer: str | None) -> None:
        self._model = model
        self._capture = StateCapture(model, layer_ids, last_layer)
        # transformers renamed the argument in 5.2x; both names are in use.
        parameters = inspect.signature(model.get_decoder().forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))

    @torch.inference_mode()
    def advance(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed tokens. Returns hidden states `[layers, n, H]` bfloat16 and logits `[n, vocabulary]`."""
        feed = torch.tensor([list(ids)], device=self._model.device)
        hidden, final = self._capture(feed, use_cache=True, **{self._argument: self._cache})
        return torch.cat(hidden).to(torch.bfloat16), self._model.lm_head(final)[0]

    def mark(self) -> Any:
        """The cache as it stands."""
        return [_snapshot(layer) for layer in self._cache.layers]

    def rollback(self, mark: Any) -> None:
        """Put the cache back, exactly; a mark serves once."""
        for layer, kept in zip(self._cache.layers, mark, strict=True):
            vars(layer).update(kept)


def _snapshot(layer: Any) -> dict[str, Any]:
    """A cache layer's attributes: keys and values, which are replaced by longer ones, as they are; what containers hold
    (the states of linear attention, overwritten in place) copied."""
    return {
        name: copy.deepcopy(value) if isinstance(value, dict | list) else value
        for name, value in layer.__dict__.items()
    }

"""Summing gradients over ranks, most of them while backward still computes the rest.

    backward      | head, loss | layer 4 | layer 3 | layer 2 | layer 1 | layer 0 | context: k, v, fc |
    on the links                          | o...down of 4 | of 3 | of 2 | of 1   | of 0   | all else   |

A layer's blocks are through it once the gradient of its normed input is there: then its matrices from o_proj to
down_proj, nine tenths of a layer and side by side in the flat buffer, have theirs. k_proj and v_proj serve the context
as well, whose backward pass comes last. At 27B shapes 2.9 GB of five layers are on their way while backward works on,
and 0.6 GB follow. Knows flat buffers and ranks, nothing of losses.
"""

from __future__ import annotations

from collections.abc import Callable

from .drafter import Drafter
from .flat import Flat
from .ranks import Ranks


class GradientSum:
    """Sums the gradients of one backward pass.

    Args:
        drafter: its `layer_done` is set.
        flat: its parameters. They must not accumulate: what was summed once may not be summed again.
        ranks: of the run.
    """

    def __init__(self, drafter: Drafter, flat: Flat, ranks: Ranks) -> None:
        self._gradients, self._ranks = flat.gradients, ranks
        depth = len(drafter.settings.layer_types)
        self._early = [
            flat.span(f"layers.{layer}.self_attn.o_proj.weight", f"layers.{layer}.mlp.down_proj.weight")
            for layer in range(depth)
        ]
        edges = [0, *(edge for span in self._early for edge in (span.start, span.stop)), len(flat.gradients)]
        self._late = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        self._waits: list[Callable[[], None]] = []
        drafter.layer_done = self._begin

    def _begin(self, layer: int) -> None:
        self._waits.append(self._ranks.begin_add(self._gradients[self._early[layer]]))

    def finish(self) -> None:
        """After backward: add what is left, and make the device wait for all of it."""
        self._waits += [self._ranks.begin_add(self._gradients[span]) for span in self._late if span.stop > span.start]
        for wait in self._waits:
            wait()
        self._waits.clear()

"""What `dflash evaluate` computes: acceptance from states, and real decoding of the same turns held against it.

Puts walk, decoding and parity together; the target is an argument. Prints nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...store import Documents, Head, Store
from ...store.progress import SILENT, Listener
from ..drafter import Drafter
from ..inputs import Ends
from .decode import Target, decode_greedy, decode_speculative
from .parity import NEAR_TIE, compare_rounds, first_difference
from .summary import Tally, summarize
from .walk import Turn, walk


def evaluate_states(drafter: Drafter, head: Head, store: Store, documents: Documents, budget: int) -> dict[str, Any]:
    """Walk the documents' turns and sum them up."""
    turns = walk(drafter, Ends.beside(head, drafter), store, documents, budget)
    found = Tally.of(turns, len(documents), drafter.settings.block_size)
    return {"documents": len(documents), **summarize(found, documents.tags)}


def evaluate_decoding(
    target: Target,
    drafter: Drafter,
    head: Head,
    store: Store,
    documents: Documents,
    ends: set[int],
    budget: int,
    listener: Listener = SILENT,
) -> dict[str, Any]:
    """Decode each turn of the documents plainly and speculatively, from what stands before it.

    Each turn is given as many new tokens as it has in the store, so that rounds compare with the walk over its states.

    Args:
        ends: tokens that end a turn.
        listener: progress counts turns.

    Returns:
        The summary of the decoded rounds, and how they agree with the walk, with plain greedy decoding and
        with the text in the store.
    """
    layers = store.layer_indices(tuple(drafter.settings.layer_ids))
    moved = Ends.beside(head, drafter)
    walked = walk(drafter, moved, store, documents, budget)
    without_prompt = sum(turn.start == 0 for turn in walked)
    walked = [turn for turn in walked if turn.start > 0]  # nothing stands before it to decode from
    near_tie = NEAR_TIE[moved.embedding.dtype]
    listener.start(len(walked), 0)
    decoded: list[Turn] = []
    rows: list[dict[str, Any]] = []
    plain_seconds = speculative_seconds = 0.0
    for turn in walked:
        part = store.part(int(documents.part[turn.document]))
        start = int(documents.start[turn.document])
        tokens = part.small("tokens")[start : start + int(documents.length[turn.document])].tolist()
        prompt, written = tokens[: turn.start], tokens[turn.start : turn.stop]
        plain = decode_greedy(target, prompt, ends, len(written))
        fast = decode_speculative(target, drafter, moved, layers, prompt, ends, len(written))
        parity = compare_rounds(turn.rounds, fast.rounds)
        differs = first_difference(plain.tokens, fast.tokens)
        rows.append(
            {
                "document": f"{int(documents.ids[turn.document]):016x}",
                "turn_start": turn.start,
                "tokens": len(fast.tokens),
                "rounds": len(fast.rounds),
                "rounds_same_as_states": parity.same,
                "rounds_agree": parity.agrees(near_tie),
                "near_tie_at_disagreement": parity.margin,
                "equals_greedy": differs is None,
                "greedy_margin_at_difference": None
                if differs is None
                else min(plain.margins[differs : differs + 1] or [0.0]),
                "equals_store": fast.tokens == written,
            }
        )
        decoded.append(replace(turn, rounds=fast.rounds))
        plain_seconds, speculative_seconds = plain_seconds + plain.seconds, speculative_seconds + fast.seconds
        listener.advance(1, "")
    produced = sum(row["tokens"] for row in rows)
    counts, counts_from_states = (
        Tally.of(turns, len(documents), drafter.settings.block_size) for turns in (decoded, walked)
    )
    return {
        "documents": len(documents),
        **summarize(counts, documents.tags),
        "accepted_length_from_states": summarize(counts_from_states, documents.tags)["accepted_length"],
        "turns_without_prompt": without_prompt,
        "near_tie": near_tie,
        "rounds_same_as_states": sum(row["rounds_same_as_states"] for row in rows),
        "turns_that_agree": sum(row["rounds_agree"] for row in rows),
        "turns_equal_to_greedy": sum(row["equals_greedy"] for row in rows),
        "turns_equal_to_store": sum(row["equals_store"] for row in rows),
        "tokens_per_second_greedy": produced / plain_seconds if plain_seconds else None,
        "tokens_per_second_speculative": produced / speculative_seconds if speculative_seconds else None,
        "each_turn": rows,
    }

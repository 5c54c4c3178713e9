"""Results as tables on a terminal. Knows the dictionaries that the stages return, nothing of how they came about."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from .console import console


def show_evaluation(result: dict[str, Any]) -> None:
    """The result of `dflash evaluate`."""
    console.print(f"drafter {result['checkpoint']}, store {result['store']}, rendering {result['rendering']}")
    if result["rendering_trained"] not in (None, result["rendering"]):
        console.print(
            f"warning: the drafter was trained on text rendered with {result['rendering_trained']}", style="bold"
        )
    table = Table("", "from states", *(["decoded"] if "decoding" in result else []))
    columns = [result[name] for name in ("states", "decoding") if name in result]
    for key, title in (
        ("documents", "documents"),
        ("turns", "turns"),
        ("rounds", "rounds"),
        ("tokens", "tokens"),
    ):
        table.add_row(title, *(f"{column[key]:,}" for column in columns))
    table.add_row("accepted length", *(_with_interval(column) for column in columns))
    for slot in range(1, result["block_size"]):
        table.add_row(f"slot {slot} accepted", *(_share(c["acceptance_by_position"][slot - 1]) for c in columns))
    for tag in sorted({tag for column in columns for tag in column["accepted_length_by_tag"]}):
        table.add_row(f"accepted length, {tag}", *(number(c["accepted_length_by_tag"].get(tag)) for c in columns))
    console.print(table)
    if "decoding" in result:
        show_agreement(result["decoding"])


def show_agreement(decoding: dict[str, Any]) -> None:
    """How real decoding agrees with plain decoding and with the walk over states."""
    turns = decoding["turns"]
    equal = decoding["turns_equal_to_greedy"]
    console.print(f"decoded text equals plain greedy decoding: {_all(equal, turns)} turns")
    for row in decoding["each_turn"]:
        if not row["equals_greedy"]:
            margin = row["greedy_margin_at_difference"]
            console.print(f"  {row['document']}: parts where the target's two best logits lie {margin:.1e} apart")
    console.print(
        f"accepted length: {number(decoding['accepted_length'])} decoded, "
        f"{number(decoding['accepted_length_from_states'])} from the states of the same turns; "
        f"{decoding['rounds_same_as_states']:,} of {decoding['rounds']:,} rounds are the same, "
        f"{_all(decoding['turns_that_agree'], turns)} turns agree (near-ties below {decoding['near_tie']} aside)"
    )
    console.print(
        f"tokens a second: plain {decoding['tokens_per_second_greedy']:.1f}, "
        f"speculative {decoding['tokens_per_second_speculative']:.1f}"
    )


def number(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def _with_interval(column: dict[str, Any]) -> str:
    low, high = column["accepted_length_interval"] or (None, None)
    return number(column["accepted_length"]) + ("" if low is None else f" ({number(low)}-{number(high)})")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _all(count: int, total: int) -> str:
    return f"all {total}" if count == total else f"{count} of {total}"

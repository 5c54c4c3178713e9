"""Reading training data: JSONL files of conversations, or of token ids with a loss mask.

Checks every line and names the first bad one. Knows nothing of tokenizers or targets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..store import DflashError

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
"""Accepted role names, and what the chat template is given for each."""


class DataError(DflashError):
    """Data that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Row:
    """One line of data: either `messages`, or `input_ids` with `loss_mask`.

    Attributes:
        place: file name and line number, for messages to people.
        tag: where it came from (`tag`, `source` or `domain` of the line, else the file's name).
        split: "train" or "heldout" when the line says so, else None.
    """

    place: str
    tag: str
    split: str | None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    input_ids: list[int] | None = None
    loss_mask: list[bool] | None = field(default=None)


def read_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of JSONL files in order; blank lines are passed over.

    Raises:
        DataError: a file is missing or a line is malformed.
    """
    for path in files:
        try:
            stream = path.open("rb")
        except OSError as error:
            raise DataError(f"cannot read the data file {path}: {error.strerror}") from None
        with stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _parse(line, f"{path.name}, line {number}", path.stem)


def file_hash(path: Path) -> str:
    """sha256 of a file's content, hexadecimal.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read the data file {path}: {error.strerror}") from None


def _parse(line: bytes, place: str, default_tag: str) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{place}: a line must be a JSON object, this one is a {type(value).__name__}")
    tag = next((value[key] for key in ("tag", "source", "domain") if isinstance(value.get(key), str)), default_tag)
    split = value.get("split")
    if split not in (None, "train", "heldout"):
        raise DataError(f"{place}: split must be 'train' or 'heldout', not {split!r}")
    if "input_ids" in value:
        ids, mask = _parse_ids(value, place)
        return Row(place, tag, split, input_ids=ids, loss_mask=mask)
    key = next((key for key in ("messages", "conversations") if key in value), None)
    if key is None:
        raise DataError(f"{place}: needs 'messages' or 'conversations', or 'input_ids' with 'loss_mask'")
    turns = value[key]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: the conversation is empty")
    messages = [_parse_turn(turn, place) for turn in turns]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{place}: the conversation has no assistant turn to learn from")
    return Row(place, tag, split, messages=messages, tools=value.get("tools"))


def _parse_turn(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise DataError(f"{place}: a turn must be an object with role and content (or from and value)")
    said = turn.get("role", turn.get("from"))
    if not isinstance(said, str) or said not in ROLES:
        raise DataError(f"{place}: unknown role {said!r}; known are {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _join_text(content, place)
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{place}: the content of a turn must be text, not {type(content).__name__}")
    extra = {key: turn[key] for key in ("reasoning_content", "tool_calls", "name", "tool_call_id") if key in turn}
    return {"role": ROLES[said], "content": content, **extra}


def _join_text(parts: list[Any], place: str) -> str:
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise DataError(f"{place}: a turn holds something that is not text (images are not supported)")
    return "".join(text for text in texts if text is not None)


def _parse_ids(value: dict[str, Any], place: str) -> tuple[list[int], list[bool]]:
    ids, mask = value["input_ids"], value.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise DataError(f"{place}: input_ids must be a list of token ids, not empty")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise DataError(f"{place}: loss_mask must hold one 0 or 1 for each of the {len(ids)} input_ids")
    return ids, [bool(m) for m in mask]

"""Reading training data: conversations, or token ids with a loss mask, from JSONL files or tables.

Checks every row and names the first bad one. Rows are read in chunks that are not parsed yet, so that other processes
can do it. Knows nothing of tokenizers or targets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

NEEDED = "needs 'messages' or 'conversations', or 'input_ids' with 'loss_mask'"

CHUNK_ROWS, CHUNK_BYTES = 64, 1 << 20
"""A chunk ends with the row that reaches either."""

SAVED = ("dataset_dict.json", "dataset_info.json")
"""One of these tells a folder that the `datasets` library wrote."""

Record = bytes | dict[str, Any]
"""A row as it was read: a line of JSON, or the columns of a table that hold something."""


class DataError(DflashError):
    """Data that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Row:
    """One row of data: either `messages`, or `input_ids` with `loss_mask`.

    Attributes:
        place: file name and line number, for messages to people.
        tag: where it came from (`tag`, `source` or `domain` of the row, else the name of the file or folder).
        split: "train" or "heldout" when the row says so (or the part of a dataset that it stands in), else None.
    """

    place: str
    tag: str
    split: str | None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    input_ids: list[int] | None = None
    loss_mask: list[bool] | None = field(default=None)


@dataclass(frozen=True)
class Source:
    """A stream of records: a file, or one split of a dataset.

    Attributes:
        name: what people are told; `counted` is what they are told to count, "line" or "row".
        split: the split of rows that say none.
        files: what it is read from; their content is its content.
        count: how many records there are.
        batches: reads them, a few at a time.
    """

    name: str
    counted: str
    split: str | None
    files: list[Path]
    count: Callable[[], int]
    batches: Callable[[], Iterator[list[Record]]]


@dataclass(frozen=True)
class Chunk:
    """Records that follow one another in one source; the first is number `first`."""

    name: str
    counted: str
    split: str | None
    tag: str
    first: int
    records: list[Record]

    def rows(self) -> Iterator[Row]:
        """Parse the records; blank lines are passed over. Raises DataError: a record is malformed."""
        for number, record in enumerate(self.records, self.first):
            if isinstance(record, dict) or record.strip():
                yield _parse(record, f"{self.name}, {self.counted} {number}", self.tag, self.split)


def read_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of data files in order (see `sources`).

    Raises:
        DataError: a file cannot be read or a row is malformed.
    """
    for chunk in read_chunks(files):
        yield from chunk.rows()


def read_chunks(files: Sequence[Path]) -> Iterator[Chunk]:
    """Yield the same rows, unparsed, in chunks. Raises DataError: a file cannot be read."""
    for path in files:
        tag = path.name if path.is_dir() else path.stem
        for source in sources(path):
            first = 1
            for records in source.batches():
                yield Chunk(source.name, source.counted, source.split, tag, first, records)
                first += len(records)


def count_rows(files: Sequence[Path]) -> int:
    """How many rows there are, blank lines included. Raises DataError: a file cannot be read."""
    return sum(source.count() for path in files for source in sources(path))


def sources(path: Path) -> list[Source]:
    """What a data file holds: JSONL; Parquet when its name ends so; a folder of such files, in the order of their names
    (its own folders are not entered); or a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.

    Raises:
        DataError: a folder holds nothing of the kind, or a package to read it with is missing.
    """
    if not path.is_dir():
        return [_source(path, path.name)]
    if any((path / name).is_file() for name in SAVED):
        return _tables(path).saved(path)
    with reading(path):
        names = sorted(file.name for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
    found = [_source(path / name, f"{path.name}/{name}") for name in names if not name.startswith(".")]
    if not found:
        raise DataError(
            f"the data folder {path} holds no *.jsonl or *.parquet files and was not written by save_to_disk: "
            "give the folder that holds them"
        )
    return found


def file_hash(path: Path) -> str:
    """sha256 of a file's content, hexadecimal; of a folder, that of the names and hashes of the files read from it.

    Raises:
        DataError: it cannot be read.
    """
    files = [file for source in sources(path) for file in source.files]
    with reading(path):
        if files == [path]:
            return _sha256(path)
        lines = [f"{_sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong in reading a file into one sentence that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, NotImplementedError) as error:  # Arrow's own errors are among these
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or ["it is damaged"])[0]
        raise DataError(f"cannot read the data file {path}: {reason}") from None


def _source(path: Path, name: str) -> Source:
    return _tables(path).parquet(path, name) if path.suffix == ".parquet" else _lines(path, name)


def _tables(path: Path) -> Any:
    try:
        from . import tables
    except ImportError:
        raise DataError(f"{path} needs the packages pyarrow and datasets: pip install 'dflash-offline[data]'") from None
    return tables


def _lines(path: Path, name: str) -> Source:
    def count() -> int:
        with reading(path), path.open("rb") as stream:
            return sum(1 for _ in stream)

    def batches() -> Iterator[list[Record]]:
        batch: list[Record] = []
        size = 0
        with reading(path), path.open("rb") as stream:
            for line in stream:
                batch.append(line)
                size += len(line)
                if len(batch) == CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    return Source(name, "line", None, [path], count, batches)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _parse(record: Record, place: str, default_tag: str, default_split: str | None) -> Row:
    value: Any = record
    if isinstance(record, bytes):
        try:
            value = json.loads(record)
        except ValueError as error:
            raise DataError(f"{place}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{place}: a line must be a JSON object, this one is a {type(value).__name__}")
    tag = next((value[key] for key in ("tag", "source", "domain") if isinstance(value.get(key), str)), default_tag)
    split = value.get("split")
    if split not in (None, "train", "heldout"):
        raise DataError(f"{place}: split must be 'train' or 'heldout', not {split!r}")
    split = split or default_split
    if "input_ids" in value:
        ids, mask = _parse_ids(value, place)
        return Row(place, tag, split, input_ids=ids, loss_mask=mask)
    key = next((key for key in ("messages", "conversations") if key in value), None)
    if key is None:
        raise DataError(f"{place}: {NEEDED}")
    turns = value[key]
    if not isinstance(turns, list):
        raise DataError(f"{place}: {key} must be a list of turns, not {type(turns).__name__}")
    if not turns:
        raise DataError(f"{place}: the conversation is empty")
    messages = [_parse_turn(turn, place) for turn in turns]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{place}: the conversation has no assistant turn to learn from")
    return Row(place, tag, split, messages=messages, tools=_parse_tools(value.get("tools"), place))


def _parse_tools(tools: Any, place: str) -> list[Any] | None:
    if isinstance(tools, str):  # in tables they often stand as text, since no two have the same arguments
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{place}: tools is not valid JSON ({error})") from None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: tools must be a list, not {type(tools).__name__}")
    return tools


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
    kept = ("reasoning_content", "tool_calls", "name", "tool_call_id")
    return {"role": ROLES[said], "content": content, **{key: turn[key] for key in kept if turn.get(key) is not None}}


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

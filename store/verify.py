"""Whether a store is whole: every byte of it compared with what was written, in parallel, every damage named.

Goes on after damage, so that one call finds all of it, and opens what `open_store` would refuse. Changes nothing.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .format import (
    CHUNK_TOKENS,
    DOCUMENTS,
    FILES_KEY,
    HEAD,
    MANIFEST,
    META,
    PLANS,
    RECORD,
    ROOT_KEY,
    SEAL_KEY,
    Identity,
    PartRecord,
    StoreError,
)
from .index import EMPTY, read_documents, read_manifest
from .place import Place, place_of
from .progress import SILENT, Listener
from .reader import Part, read_root
from .sums import LIST, check_files, seal

MEGABYTE = 1_000_000


@dataclass
class Report:
    """What was found.

    Attributes:
        problems: one sentence a damage, each naming what is damaged.
        damaged: ids of the parts concerned.
        lost: those of them that are not there at all.
        parts: parts looked at.
        bytes: bytes read and compared.
        seconds: how long it took.
    """

    problems: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    parts: int = 0
    bytes: int = 0
    seconds: float = 0.0


def verify(location: str | Path | Place, listener: Listener = SILENT, threads: int | None = None) -> Report:
    """Check a whole store.

    Args:
        listener: progress counts megabytes.
        threads: parts looked at a time; by default what suits the place.

    Raises:
        StoreError: there is no store that could be looked at.
    """
    place = place_of(location)
    began = time.perf_counter()
    identity, folder = read_root(place)
    report = Report(_check_root(place))
    sizes: dict[str, int] = {}
    try:
        for name, size in place.files(folder).items():
            part, slash, _ = name.partition("/")
            if slash:
                sizes[part] = sizes.get(part, 0) + size
        names = place.folders(folder)
    except FileNotFoundError:
        names = []
        report.problems.append(f"{place}/{folder} is missing: the store has lost its parts")
    if not place.whole_folders:  # what has no record there was never committed
        names = [name for name in names if place.exists(f"{folder}/{name}/{RECORD}")]
    listed = read_manifest(place, folder) or {}
    for name in sorted(listed.keys() - set(names)):
        report.problems.append(f"part {name} is in the manifest and no longer in {place}/{folder}")
        report.damaged.append(name)
        report.lost.append(name)
    listener.start(sum(sizes.get(name, 0) for name in names) // MEGABYTE, 0)
    with ThreadPoolExecutor(threads or place.threads, thread_name_prefix="dflash-verify") as pool:
        jobs = {pool.submit(check_part, place, f"{folder}/{name}", identity, listed.get(name)): name for name in names}
        for job in as_completed(jobs):
            name, problems = jobs[job], _result(job)
            if problems:
                report.problems += problems
                report.damaged.append(name)
            before = report.bytes // MEGABYTE
            report.parts, report.bytes = report.parts + 1, report.bytes + sizes.get(name, 0)
            listener.advance(report.bytes // MEGABYTE - before, "")
    report.damaged.sort()
    report.seconds = time.perf_counter() - began
    return report


def _result(job: Future[list[str]]) -> list[str]:
    try:
        return job.result()
    except OSError as error:  # what may not be read, or what the disk fails to give
        return [f"{error.filename}: {error.strerror}"]


def check_part(place: Place, key: str, identity: Identity, listed: PartRecord | None = None) -> list[str]:
    """What is wrong with the part at `key`: one sentence each, none if it is whole.

    Args:
        listed: what the manifest says of it, to be compared too.
    """
    name = f"{place}/{key}"
    try:
        attributes = json.loads(place.read(f"{key}/{RECORD}"))["attributes"]
        said, files, sealed = attributes[ROOT_KEY], attributes[FILES_KEY], attributes[SEAL_KEY]
        record = PartRecord.model_validate(said)
    except FileNotFoundError:
        return [f"{name}/{RECORD} is missing: the part is not whole"]
    except (ValueError, KeyError, TypeError):
        return [f"{name}/{RECORD} cannot be read: it is damaged"]
    if seal(said, files) != sealed:
        return [f"{name}/{RECORD} does not agree with its checksum: it is damaged"]
    if record.id != key.rpartition("/")[2]:
        return [f"{name} holds part {record.id}: it was renamed"]
    problems = dict.fromkeys(_check_group(place, f"{key}/{RECORD}"))
    problems |= dict.fromkeys(check_files(place, key, files))  # a shard that is gone is found once a chunk
    if listed is not None and listed != record:
        problems[f"{name} does not agree with what {MANIFEST} says of it"] = None
    part = Part(place, key, identity.encoding)
    for array, layers in [("hidden", len(identity.layer_ids)), *([("final", 1)] if identity.final else [])]:
        problems |= dict.fromkeys(_check_rows(part, array, layers, record.tokens, name))
    if not problems:
        problems |= dict.fromkeys(_check_counts(part, record, name))
    part.close()
    return list(problems)


def _check_rows(part: Part, array: str, layers: int, tokens: int, name: str) -> list[str]:
    try:
        rows = part.rows(array)
    except StoreError as error:
        return [str(error)]
    if rows.tokens != tokens:
        return [f"{name}/{array} has {rows.tokens} rows where {tokens} are due"]
    problems = []
    for chunk in range(-(-tokens // CHUNK_TOKENS)):
        for layer in range(layers):
            try:
                rows.check(chunk, layer)
            except StoreError as error:
                problems.append(str(error))
    return problems


def _check_counts(part: Part, record: PartRecord, name: str) -> list[str]:
    offsets, ids = part.small("doc_offsets"), part.small("doc_ids")
    codes, _ = part.tags()
    tokens = {len(part.small("tokens")), len(part.small("loss_mask")), int(offsets[-1]), record.tokens}
    documents = {len(offsets) - 1, len(ids), len(codes), record.documents}
    return [] if len(tokens) == len(documents) == 1 else [f"{name}: counts of tokens and documents do not agree"]


def _check_root(place: Place) -> list[str]:
    """The files beside the parts: the root's record, the head, plans, manifest and document index."""
    attributes: dict[str, Any] = json.loads(place.read(RECORD))["attributes"]
    said, head = attributes[ROOT_KEY], attributes.get(FILES_KEY, {})
    if seal(said, head) != attributes.get(SEAL_KEY):
        return [f"{place}/{RECORD} does not agree with its checksum: it is damaged"]
    problems = check_files(place, HEAD, head)
    for group in (RECORD, f"{META}/{RECORD}", f"{said['parts']}/{RECORD}"):
        problems += _check_group(place, group)
    try:
        plans = place.folders(PLANS)
    except FileNotFoundError:
        plans = []  # tools that copy trees drop empty folders
    for plan in plans:
        try:
            problems += check_files(place, f"{PLANS}/{plan}", json.loads(place.read(f"{PLANS}/{plan}/{LIST}")))
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            problems.append(f"{place}/{PLANS}/{plan}/{LIST} cannot be read: the plan is not whole")
    remedy = "it is derived from the parts: delete it, and the next extraction writes it anew"
    if place.exists(MANIFEST) and read_manifest(place, said["parts"]) is None:
        problems.append(f"{place}/{MANIFEST} is damaged or of another generation of parts; {remedy}")
    if place.exists(DOCUMENTS) and read_documents(place) is EMPTY:
        problems.append(f"{place}/{DOCUMENTS} is damaged; {remedy}")
    return problems


def _check_group(place: Place, key: str) -> list[str]:
    """Whether a group's own file is one that Zarr would read."""
    try:
        metadata = json.loads(place.read(key))
        whole = metadata["zarr_format"] == 3 and metadata["node_type"] == "group"
    except FileNotFoundError:
        return [f"{place}/{key} is missing"]
    except (ValueError, KeyError, TypeError):
        whole = False
    return [] if whole else [f"{place}/{key} is damaged: it does not describe a group"]

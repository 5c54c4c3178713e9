"""Collect the training text of the demo target and split it.

    python corpus.py --lib LIB_3.13 --lib LIB_3.12 --docs DOC_SOURCES --out WORK

Reads the `.py` files of one or more Python standard libraries (the first one named wins where a module is in
several) and the reStructuredText sources of the documentation. Writes `raw.jsonl` (whole files) and
`tasks.jsonl` (chat tasks cut from them, see tasks.py), each record with its kind and its split. A file is
held out by the hash of its module path, so every version of a module, and every task cut from it, lands on
the same side.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tasks

# Tables of numbers, generated text and copies of the documentation: long, and nothing to learn from.
SKIP = re.compile(
    r"(^|/)(site-packages|__pycache__|config-[^/]*|__phello__|cjkencodings|_sysconfigdata[^/]*)(/|$)"
    r"|topics\.py$|^encodings/(cp|iso|mac_|koi8|kz|hp_|tis|ptcp|palmos)"
    r"|bad_?(coding|syntax)|badsyntax|tokenizedata|^keyword\.py|lib2to3/tests/data"
)
TESTS = re.compile(r"(^|/)(tests?|idle_test)(/|$)")
SHINGLE = 4  # lines: two files that share most of their runs of four lines are versions of one file


@dataclass
class SourceFile:
    """One file of the corpus; `kind` is code, test or docs."""

    path: str
    kind: str
    split: str
    text: str


def module_key(path: str) -> str:
    """A name that two versions of a module share, also when a module became a package."""
    key = re.sub(r"\.rst\.txt$|\.py$", "", path)
    return re.sub(r"/(__init__|_local|__main__)$", "", key)


def choose_split(path: str, share: float) -> str:
    """Hold out `share` of the files by the hash of their module path alone."""
    value = int.from_bytes(hashlib.sha256(module_key(path).encode()).digest()[:8], "big")
    return "heldout" if value < share * 2**64 else "train"


def shingles(text: str) -> set[int]:
    """Hashes of the runs of a few non-blank lines of a text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {hash(tuple(lines[i : i + SHINGLE])) for i in range(max(1, len(lines) - SHINGLE + 1))}


def read_text(path: Path) -> str | None:
    """The text of a file, tidied; None when it is not UTF-8 or too small to matter."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    if "\0" in text or "\r" in text:
        return None
    text = re.sub(r"[ \t]+(?=\n)", "", text).replace("\f", "").strip("\n") + "\n"
    return text if len(text) > 200 else None


def library_files(roots: list[Path], share: float, dropped: Counter[str]) -> Iterator[SourceFile]:
    """The library's modules, each once: later roots only add what no earlier root holds in any form."""
    known_paths: set[str] = set()
    known: set[int] = set()
    for number, root in enumerate(roots):
        fresh: list[SourceFile] = []
        for file in sorted(root.rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if SKIP.search(path):
                continue
            if module_key(path) in known_paths:
                dropped["same module in an earlier root"] += 1
                continue
            text = read_text(file)
            if text is None:
                dropped["not text, or tiny"] += 1
                continue
            if number:
                mine = shingles(text)
                if len(mine & known) > 0.3 * len(mine):
                    dropped["near copy of a file in an earlier root"] += 1
                    continue
            kind = "test" if TESTS.search(path) else "code"
            fresh.append(SourceFile(path, kind, choose_split(path, share), text))
        for item in fresh:
            known_paths.add(module_key(item.path))
            known |= shingles(item.text)
        yield from fresh


def docs_files(root: Path, share: float) -> Iterator[SourceFile]:
    """The documentation's sources."""
    for file in sorted(root.rglob("*.rst.txt")):
        text = read_text(file)
        if text is not None:
            path = "doc/" + file.relative_to(root).as_posix()
            yield SourceFile(path, "docs", choose_split(path, share), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path, action="append", required=True, help="a standard library folder")
    parser.add_argument("--docs", type=Path, required=True, help="folder with the *.rst.txt sources")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=float, default=0.04, help="share of the files to hold out")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    dropped: Counter[str] = Counter()
    files = list(library_files(args.lib, args.heldout, dropped)) + list(docs_files(args.docs, args.heldout))
    with (args.out / "raw.jsonl").open("w") as out:
        for item in files:
            out.write(json.dumps(asdict(item)) + "\n")

    counts: Counter[str] = Counter()
    with (args.out / "tasks.jsonl").open("w") as out:
        for item in files:
            rng = random.Random(item.path)  # a file's tasks do not depend on the other files
            for number, task in enumerate(tasks.make(item.path, item.kind, item.text, rng)):
                record = {"id": f"{item.path}#{number}", "split": item.split, "kind": item.kind, **task}
                out.write(json.dumps(record) + "\n")
                counts[f"{item.split} {item.kind} {task['tag']}"] += 1

    size: Counter[str] = Counter()
    number_of: Counter[str] = Counter()
    for item in files:
        size[f"{item.split} {item.kind}"] += len(item.text.encode())
        number_of[f"{item.split} {item.kind}"] += 1
    for key in sorted(size):
        print(f"{key}: {number_of[key]} files, {size[key]:,} bytes")
    for key in sorted(counts):
        print(f"tasks {key}: {counts[key]:,}")
    for key in sorted(dropped):
        print(f"left out, {key}: {dropped[key]}")


if __name__ == "__main__":
    main()

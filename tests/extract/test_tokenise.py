"""From data files to the corpus: the same whatever the processes, made once, and never taken from a damaged copy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import BUNDLED, conversation, write_data

from dflash_offline.extract import corpora, tokenise
from dflash_offline.extract.corpora import corpora_folder
from dflash_offline.extract.corpus import Corpus, Notes
from dflash_offline.extract.data import Chunk, DataError, file_hash, read_chunks, read_rows
from dflash_offline.extract.render import Renderer
from dflash_offline.extract.settings import DataSettings
from dflash_offline.extract.target import load_tokenizer
from dflash_offline.store.progress import SILENT, Listener

Tokenise = Callable[..., tuple[Corpus, Notes]]


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(BUNDLED / "target"), thinking=False)


@pytest.fixture
def run(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenise:
    """Tokenise a file, as if it were large, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenise, "SMALL", 0)

    def run(*files: Path, processes: int = 1, listener: Listener = SILENT, **settings: Any) -> tuple[Corpus, Notes]:
        digests = {path.name: file_hash(path) if path.exists() else "" for path in files}
        info: Any = SimpleNamespace(vocab_size=8192)
        return tokenise.tokenise(
            list(files), digests, info, renderer, DataSettings(files=[], **settings), listener, processes
        )

    return run


def same(a: Corpus, b: Corpus) -> bool:
    return all(np.array_equal(value, getattr(b, name)) for name, value in vars(a).items() if name != "lengths")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_every_document_once_and_the_same_in_any_number_of_processes(
    run: Tokenise, renderer: Renderer, tmp_path: Path
) -> None:
    rows: list[Any] = [{"messages": conversation(n, turns=1 + n % 2), "tag": f"t{n % 3}"} for n in range(300)]
    rows[40] = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}
    rows[90] = ""
    rows[200], rows[250] = rows[7], {**rows[8], "tag": "elsewhere"}
    first, second = write(tmp_path / "one.jsonl", rows[:180]), write(tmp_path / "two.jsonl", rows[180:])

    expected: dict[tuple[tuple[int, ...], tuple[bool, ...]], str] = {}
    for row in read_rows([first, second]):
        if row.messages is not None:
            ids, mask = renderer.ids_and_mask(row)
            if any(mask[:64][1:] & mask[:64][:-1]):
                expected.setdefault((tuple(ids[:64].tolist()), tuple(mask[:64].tolist())), row.place)
    corpus, notes = run(first, second, max_length=64)
    found = [
        (tuple(corpus.tokens[r].tolist()), tuple(corpus.loss_mask[r].tolist()))
        for r in map(corpus.rows, range(len(corpus)))
    ]
    assert dict(zip(found, corpus.places, strict=True)) == expected
    assert len(found) == 300 - 4
    assert (notes.duplicates, notes.unsupervised) == (2, 1)
    assert notes.first_duplicate == "two.jsonl, line 21 repeats one.jsonl, line 8"
    assert 0 < notes.cut < 300

    shutil.rmtree(corpora_folder())
    others, other_notes = run(first, second, max_length=64, processes=2)
    assert same(corpus, others)
    assert notes == other_notes


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_bad_row_is_named_whoever_meets_it(processes: int, run: Tokenise, tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": conversation(n)} for n in range(400)]
    rows[150]["messages"][1]["content"] = "no end<|im_end|> to it"
    rows[170] = "{"
    damaged = tmp_path / "damaged.parquet"  # reading is ahead of tokenising, and comes upon it first
    pq.write_table(pa.table({"messages": [conversation(n) for n in range(50)]}), damaged)
    damaged.write_bytes(damaged.read_bytes()[:4] + bytes(200) + damaged.read_bytes()[204:])
    with pytest.raises(DataError, match=r"data\.jsonl, line 151: a turn holds"):
        run(write(tmp_path / "data.jsonl", rows), damaged, processes=processes)
    with pytest.raises(DataError, match=r"cannot read the data file .*damaged"):
        run(write(tmp_path / "data.jsonl", rows[:150]), damaged, processes=processes)
    assert not corpora_folder().exists()


def test_progress_is_counted_in_rows(run: Tokenise, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    told = Listener(lambda line: None, lambda all_, _: seen.append(("of", all_)), lambda n, _: seen.append(("rows", n)))
    data = write_data(tmp_path / "data.jsonl", 150)
    run(data, listener=Listener(SILENT.say, SILENT.start, SILENT.advance, lambda title, unit: told))
    assert seen[0] == ("of", 150)
    assert sum(count for what, count in seen[1:] if what == "rows") == 150
    assert len(seen) > 2


def test_a_corpus_is_made_once_for_the_same_data_and_settings(run: Tokenise, tmp_path: Path) -> None:
    said: list[str] = []
    listener = Listener(said.append, SILENT.start, SILENT.advance)
    data = write_data(tmp_path / "data.jsonl", 30)
    write(data, [*data.read_text().splitlines(), data.read_text().splitlines()[3]])
    first, notes = run(data, listener=listener)
    assert said == []
    again, noted = run(data, listener=listener)
    assert said == ["the data was tokenised by an earlier run"]
    assert same(first, again)
    assert asdict(notes) == asdict(noted)
    assert noted.duplicates == 1

    for change in ({"max_length": 50}, {"limit": 3}, {"tags": ["code"]}):
        assert not same(run(data, listener=listener, **change)[0], first)
    run(data.rename(tmp_path / "renamed.jsonl"), listener=listener)  # places tell the name
    run(write_data(tmp_path / "renamed.jsonl", 31), listener=listener)
    assert len(said) == 1


def test_the_key_tells_renderings_apart(renderer: Renderer) -> None:
    settings = DataSettings.model_validate({"files": []})

    def key_of(thinking: bool, **changes: str) -> str:
        tokenizer = load_tokenizer(BUNDLED / "target")
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        return corpora.corpus_key({"a": "1"}, Renderer(tokenizer, thinking), settings, 8192)

    template = str(load_tokenizer(BUNDLED / "target").chat_template)
    keys = {key_of(False), key_of(True), key_of(False, chat_template=template + " "), key_of(False, bos_token="<s>")}
    assert len(keys) == 4
    assert key_of(False) == corpora.corpus_key({"a": "1"}, renderer, settings, 8192)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["corpus.safetensors", "corpus.json", "notes.json", "files.json"])
@pytest.mark.parametrize(
    "damage", [flip, Path.unlink, lambda path: os.truncate(path, 9), lambda path: path.write_text("{}")]
)
def test_a_damaged_copy_is_made_anew(damage: Callable[[Path], Any], name: str, run: Tokenise, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl", 6)
    first, notes = run(data)
    (entry,) = corpora_folder().iterdir()
    whole = {path.name: path.read_bytes() for path in entry.iterdir()}
    damage(entry / name)
    said: list[str] = []
    again = run(data, listener=Listener(said.append, SILENT.start, SILENT.advance))
    assert said == []
    assert same(first, again[0])
    assert again[1] == notes
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == whole
    assert list(corpora_folder().iterdir()) == [entry]


def test_those_used_longest_ago_go(run: Tokenise, tmp_path: Path) -> None:
    files = [write_data(tmp_path / f"{n}.jsonl", 4, first=n * 10) for n in range(corpora.KEPT)]
    (corpora_folder() / "unfinished.x").mkdir(parents=True)  # what a killed run left
    os.utime(corpora_folder() / "unfinished.x", (1, 1))
    for age, path in enumerate(files):
        run(path)
        newest = max(corpora_folder().iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (100 + age, 100 + age))
    kept = sorted(corpora_folder().iterdir(), key=lambda path: path.stat().st_mtime)
    assert len(kept) == corpora.KEPT
    run(files[0])  # used again
    run(write_data(tmp_path / "more.jsonl", 4, first=90))
    left = set(corpora_folder().iterdir())
    assert len(left) == corpora.KEPT
    assert set(kept) - left == {kept[1]}


def test_a_cache_that_cannot_be_written_is_said_and_passed_over(run: Tokenise, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    said: list[str] = []
    data = write_data(tmp_path / "data.jsonl", 6)
    corpus, _ = run(data, listener=Listener(said.append, SILENT.start, SILENT.advance))
    assert len(corpus) == 6
    assert len(said) == 1
    assert "not kept for another run" in said[0]


def test_little_data_is_not_kept(run: Tokenise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "SMALL", 7)
    run(write_data(tmp_path / "data.jsonl", 6))
    assert not corpora_folder().exists()
    run(write_data(tmp_path / "data.jsonl", 7))
    assert len(list(corpora_folder().iterdir())) == 1


def test_nothing_to_learn_from_is_refused(run: Tokenise, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, n % 2, 0]} for n in range(3)]
    with pytest.raises(DataError, match="no document has two supervised tokens in a row"):
        run(write(tmp_path / "data.jsonl", rows))


def test_a_killed_process_is_said(renderer: Renderer, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl", 1500)

    def chunks() -> Iterator[Chunk]:
        for number, chunk in enumerate(read_chunks([data])):
            if number == 12:
                for child in active_children():
                    os.kill(child.pid or 0, signal.SIGKILL)
            yield chunk

    encoder = tokenise.Encoder(renderer, DataSettings.model_validate({"files": []}), 8192)
    with pytest.raises(DataError, match="ended from outside"):
        list(tokenise._pieces(chunks(), encoder, 2))


ENDLESS = """
import itertools, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from dflash_offline.extract.settings import DataSettings
from dflash_offline.extract.data import read_chunks
from dflash_offline.extract.render import Renderer
from dflash_offline.extract.tokenise import Encoder, _pieces

if __name__ == "__main__":
    tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
    encoder = Encoder(Renderer(tokenizer, False), DataSettings(files=[]), 8192)
    for _ in _pieces(itertools.cycle(read_chunks([Path(sys.argv[2])])), encoder, 2):
        print("made", flush=True)
"""


def test_no_process_outlives_a_kill(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    data = write_data(tmp_path / "data.jsonl", 64)
    command = [sys.executable, str(tmp_path / "endless.py"), str(BUNDLED / "target"), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        for child in alive:
            child.kill()
        assert alive == []

"""Workers as processes of their own: killed ones, units that fail, other schedulers, other machines."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import fill
from distributed import Client
from stores import files_of
from tiny import write_data

from dflash_offline.extract import cluster, dispatch
from dflash_offline.extract.cluster import ClusterError, connect, local_cluster, serve
from dflash_offline.extract.dispatch import Dispatch
from dflash_offline.extract.run import Prepared, extract
from dflash_offline.extract.target import TargetError
from dflash_offline.store import HELDOUT, TRAIN, Store, open_store
from dflash_offline.store.progress import SILENT, Listener
from dflash_offline.store.verify import verify

MakeStore = Callable[..., Prepared]
DFLASH = [sys.executable, "-m", "dflash_offline.pipelines.cli"]


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Client]:
    with local_cluster(["cpu", "cpu"]) as client:
        yield client


@pytest.fixture
def pair(two_workers: Client) -> Client:
    """Two workers, those that a test before killed replaced."""
    two_workers.wait_for_workers(2)
    return two_workers


def all_ids(store: Store) -> list[int]:
    return [int(i) for split in (HELDOUT, TRAIN) for i in store.documents(split).ids]


def parts_in(store: Path) -> int:
    return len(list(store.glob("parts/*/zarr.json")))


def committed(store: Path) -> dict[str, bytes]:
    """Every file of a store; what a killed worker had staged is cleared by the next command that writes there."""
    return {name: content for name, content in files_of(store).items() if not name.startswith("meta/staging")}


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def test_a_worker_killed_at_any_moment_leaves_no_trace(
    pair: Client, dense: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    data = [write_data(tmp_path / "data.jsonl", 120)]
    calm = make_store(dense, data, tmp_path / "calm", unit_tokens=200)
    fill(calm).write_index()
    rng = random.Random(int(os.environ.get("DFLASH_TEST_SEED", "0")))
    for _ in range(int(os.environ.get("DFLASH_TEST_KILLS", "1"))):
        victims = [child for child in multiprocessing.active_children() if "Dask" in child.name]
        killing = threading.Timer(rng.uniform(0, 0.05), rng.choice(victims).kill)
        begun = rng.randint(1, len(calm.plan.units) // 2)
        counted: list[int] = []

        def advance(
            tokens: int, _: str, killing: threading.Timer = killing, begun: int = begun, counted: list[int] = counted
        ) -> None:
            counted.append(tokens)
            if len(counted) == begun:
                killing.start()

        said: list[str] = []
        prepared = make_store(dense, data, tmp_path / "hit", unit_tokens=200)
        store = extract(prepared, pair, Listener(said.append, lambda total, done: None, advance))
        assert any("was lost" in line for line in said), "the kill came too late"
        assert sum(counted) == store.tokens  # what the killed tries had done was taken back
        assert committed(tmp_path / "hit") == committed(tmp_path / "calm")
        shutil.rmtree(tmp_path / "hit")


def test_a_unit_that_fails_three_times_is_set_aside_and_no_other(
    pair: Client, dense: Path, tmp_path: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = tmp_path / "tried"
    tried.mkdir()

    def work(job: Any, unit: str, progress: Callable[[int], None]) -> str:
        (tried / f"{unit} {time.monotonic()}").touch()
        progress(3)
        if unit == "broken":
            raise ValueError("broken as ever")
        time.sleep(0.2)
        if unit in ("killer", "murderer"):
            os.kill(os.getpid(), signal.SIGKILL)
        return unit

    job = make_store(dense, [write_data(tmp_path / "data.jsonl", 4)], tmp_path / "s").job
    names = ["u0", "killer", "u1", "u2", "broken", "u3", "u4", "u5", "u6", "murderer", "u7"]
    said: list[str] = []
    counted: list[int] = []
    listener = Listener(said.append, lambda total, done: None, lambda tokens, _: counted.append(tokens))
    outcome = Dispatch(pair, job, dict.fromkeys(names, 10), listener, work=work).run()
    bad = {"killer": "its worker died", "murderer": "its worker died", "broken": "broken as ever"}
    assert outcome.set_aside == bad
    assert sorted(outcome.reports) == sorted(set(names) - set(bad))
    assert sum(counted) == 10 * len(outcome.reports)
    tries = {name: sum(path.name.startswith(f"{name} ") for path in tried.iterdir()) for name in names}
    assert all(tries[name] == 3 if name in bad else tries[name] <= 3 for name in names)
    assert "unit broken failed (broken as ever), trying again" in said
    assert sum("was lost" in line for line in said) == 6

    monkeypatch.setattr(dispatch, "DEATHS", 2)  # and when all die, whatever they do
    with pytest.raises(ClusterError, match="2 workers died in a row without finishing a unit"):
        Dispatch(pair, job, {"killer": 1, "murderer": 1}, SILENT, work=work).run()


def test_a_sick_worker_takes_no_units_down_with_it(
    pair: Client, dense: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    """A process that lives on and fails at once, as after an error of its GPU, would be the first to be free always."""

    def work(job: Any, unit: str, progress: Callable[[int], None]) -> str:
        if getattr(os, "sick", False):
            raise RuntimeError("an illegal memory access was encountered")
        time.sleep(0.05)
        return unit

    job = make_store(dense, [write_data(tmp_path / "data.jsonl", 4)], tmp_path / "s").job
    pair.run(setattr, os, "sick", True, workers=list(pair.scheduler_info()["workers"])[:1])
    names = [f"u{number}" for number in range(30)]
    said: list[str] = []
    listener = Listener(said.append, lambda total, done: None, lambda tokens, _: None)
    outcome = Dispatch(pair, job, dict.fromkeys(names, 10), listener, work=work).run()
    assert sorted(outcome.reports) == sorted(names)
    assert outcome.set_aside == {}
    assert sum("failed 3 units in a row and is started anew" in line for line in said) == 1


def test_a_target_that_one_worker_cannot_load_is_left_to_the_others(
    pair: Client, dense: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    def work(job: Any, unit: str, progress: Callable[[int], None]) -> str:
        if getattr(os, "short", False) or unit == "nobody's":
            raise TargetError("no memory is left on its GPU")
        time.sleep(0.05)
        return unit

    job = make_store(dense, [write_data(tmp_path / "data.jsonl", 4)], tmp_path / "s").job
    pair.run(setattr, os, "short", True, workers=list(pair.scheduler_info()["workers"])[:1])
    said: list[str] = []
    listener = Listener(said.append, lambda total, done: None, lambda tokens, _: None)
    names = [f"u{number}" for number in range(6)]
    assert sorted(Dispatch(pair, job, dict.fromkeys(names, 10), listener, work=work).run().reports) == names
    assert sum("cannot be used: no memory is left on its GPU; the others go on" in line for line in said) == 1
    with pytest.raises(ClusterError, match=r"worker .* cannot be used: no memory is left"):
        Dispatch(pair, job, {"nobody's": 10}, SILENT, work=work).run()
    pair.run(setattr, os, "short", False)


def test_a_worker_that_sees_another_store_is_refused(
    pair: Client, dense: Path, tmp_path: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    prepared = make_store(dense, [write_data(tmp_path / "data.jsonl", 6)], tmp_path / "here/s")
    monkeypatch.chdir(tmp_path / "here")
    prepared = replace(prepared, store=open_store("s"), job=replace(prepared.job, store="s"))
    home = os.getcwd()
    try:
        pair.run(os.chdir, str(tmp_path / "there"))
        with pytest.raises(ClusterError, match=r"worker .* on .* cannot be used: .*s\b"):
            extract(prepared, pair, SILENT)
        shutil.copytree("s", tmp_path / "there/s")  # the same path on a disk of its own
        with pytest.raises(ClusterError, match="cannot be used: the path s leads to another store there"):
            extract(prepared, pair, SILENT)
    finally:
        pair.run(os.chdir, home)
    assert parts_in(tmp_path / "here/s") == parts_in(tmp_path / "there/s") == 0
    with pytest.raises(ClusterError, match="it runs on the CPU, and this extraction on a GPU"):
        extract(replace(prepared, job=replace(prepared.job, device="cuda")), pair, SILENT)


def test_a_worker_that_leaves_on_purpose_costs_no_unit_a_try(
    pair: Client, dense: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    job = make_store(dense, [write_data(tmp_path / "data.jsonl", 4)], tmp_path / "s").job
    said: list[str] = []
    counted: list[int] = []
    leaving = list(pair.scheduler_info()["workers"])[:1]

    def work(job: Any, unit: str, progress: Callable[[int], None]) -> str:
        progress(3)
        time.sleep(0.3)
        return unit

    def advance(tokens: int, _: str) -> None:
        counted.append(tokens)
        if len(counted) == 4:  # two are under way in each
            pair.retire_workers(leaving)

    units = {f"u{number}": 10 for number in range(8)}
    outcome = Dispatch(pair, job, units, Listener(said.append, lambda total, done: None, advance), work=work).run()
    assert sorted(outcome.reports) == sorted(units)
    assert len(said) == 1
    assert said[0].endswith("has left")
    assert sum(counted) == 80


def test_a_thousand_documents_over_one_three_and_eight_workers(
    dense: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    """Started with one worker, stopped, gone on with three, stopped again, and ended with eight."""
    data = [write_data(tmp_path / "data.jsonl", 1000, heldout=30)]
    one = fill(make_store(dense, data, tmp_path / "one", unit_tokens=2000, batch_tokens=2000))
    prepared = make_store(dense, data, tmp_path / "many", unit_tokens=2000, batch_tokens=2000)
    for workers in (1, 3):
        left = [sum(part.tokens for part in one.parts) // 3]

        def advance(tokens: int, _: str, left: list[int] = left) -> None:
            left[0] -= tokens
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            extract(prepared, ["cpu"] * workers, Listener(lambda line: None, lambda total, done: None, advance))
    store = extract(prepared, ["cpu"] * 8, SILENT)
    assert len(all_ids(store)) == len(set(all_ids(store))) == 1000
    assert all_ids(store) == all_ids(one)
    assert files_of(tmp_path / "many/parts") == files_of(tmp_path / "one/parts")


def test_ctrl_c_ends_an_extraction_and_its_workers(dense: Path, tmp_path: Path) -> None:
    project(dense, tmp_path, 300)
    process = start(tmp_path, "extract", "extract", "--gpus", "cpu")
    until(lambda: parts_in(tmp_path / "states") > 2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all
    time.sleep(0.7)
    os.killpg(process.pid, signal.SIGINT)  # and people are impatient
    assert process.wait() == 130
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert said(tmp_path, "extract")[-1] == "dflash: stopped; run the same command again to go on"
    assert not any("Traceback" in line for line in said(tmp_path, "extract"))
    assert verify(tmp_path / "states").problems == []


ORPHANS = """
import os, time
from dflash_offline.extract.cluster import local_cluster
if __name__ == "__main__":
    with local_cluster(["cpu", "cpu"]) as client:
        print(*client.run(os.getpid).values(), flush=True)
        client.submit(time.sleep, 300).result()
"""


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    (tmp_path / "orphans.py").write_text(ORPHANS)
    process = subprocess.Popen([sys.executable, str(tmp_path / "orphans.py")], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    process.kill()
    process.communicate()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def project(target: Path, folder: Path, documents: int) -> None:
    """A `dflash.toml` for small units."""
    data = write_data(folder / "data.jsonl", documents)
    command = [*DFLASH, "init", "--target", str(target), "--data", str(data), "--set", "extract.unit_tokens=300"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def start(folder: Path, name: str, *arguments: str, command: list[str] = DFLASH) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; what it says goes to a file of that name."""
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *arguments], cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def said(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.log").read_text().splitlines()


def test_workers_come_and_go_at_a_scheduler(dense: Path, tmp_path: Path) -> None:
    project(dense, tmp_path, 400)
    file = tmp_path / "scheduler.json"
    options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    scheduler = start(tmp_path, "scheduler", *options, command=[sys.executable, "-m", "distributed.cli.dask_scheduler"])
    workers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        until(lambda: file.is_file() and file.read_text().endswith("}"))
        address = json.loads(file.read_text())["address"]
        extraction = start(tmp_path, "extract", "extract", "--scheduler", address)
        for name in ("killed", "faithful"):
            workers[name] = start(tmp_path, name, "worker", "--scheduler", address, "--gpus", "cpu")
        until(lambda: parts_in(tmp_path / "states") > 5 or extraction.poll() is not None)
        workers["killed"].kill()
        assert extraction.wait() == 0, said(tmp_path, "extract")
        lines = said(tmp_path, "extract")
        assert sum("was lost" in line for line in lines) == 1
        assert sum("trying again" in line for line in lines) <= 2  # those that the killed one had
        scheduler.terminate()
        assert workers["faithful"].wait() == 0
        assert said(tmp_path, "faithful")[-1] == f"the scheduler at {address} is gone"
    finally:
        for process in (scheduler, *workers.values()):
            process.kill()
    store = open_store(tmp_path / "states")
    assert len(all_ids(store)) == len(set(all_ids(store))) == 400
    assert verify(store.place).problems == []


TWO_HOSTS = """
set -e
unshare -n sleep 300 & peer=$!
ip link set lo up
until ip link add one type veth peer name two netns $peer; do sleep 0.1; done 2>/dev/null
ip addr add 10.77.0.1/24 dev one
ip link set one up
on_peer="nsenter -t $peer -n"
$on_peer ip link set lo up
$on_peer ip addr add 10.77.0.2/24 dev two
$on_peer ip link set two up
set +e
"""
"""A shell with a second host beside it: another network, other loopback, a wire between the two."""


def test_two_hosts(dense: Path, tmp_path: Path) -> None:
    tried = subprocess.run(["unshare", "-rn", "sh", "-c", f"{TWO_HOSTS} kill $peer"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"network namespaces are not to be had here: {tried.stderr.strip()}")
    project(dense, tmp_path, 40)
    dflash, address = " ".join(DFLASH), "tcp://10.77.0.1:8786"
    script = f"""{TWO_HOSTS}
{sys.executable} -m distributed.cli.dask_scheduler --host 10.77.0.1 --no-dashboard 2>/dev/null & scheduler=$!
$on_peer {dflash} worker --scheduler {address} --gpus cpu & worker=$!
{dflash} extract --scheduler {address}; echo extract $?
kill $worker; wait $worker; echo worker $?
kill $scheduler $peer
"""
    done = subprocess.run(["unshare", "-rn", "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert "extract 0" in lines, done.stderr
    assert "worker 0" in lines, done.stderr
    assert any(line.startswith(f"cpu: joined {address} as tcp://10.77.0.2:") for line in lines)
    assert len(all_ids(open_store(tmp_path / "states"))) == 40


def test_where_no_scheduler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER", 0.5)
    for join in (lambda address: connect(address).__enter__(), lambda address: serve(address, ["cpu"], 1, None, print)):
        with pytest.raises(ClusterError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
            join("127.0.0.1:9")
        with pytest.raises(ClusterError, match="nonsense is no scheduler's address"):
            join("nonsense")


def test_gpus_are_shared_out_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = [options["env"]["CUDA_VISIBLE_DEVICES"] for _, options in cluster._workers(["0", "1", "2", "3"], 2)]
    assert found == ["4,5", "6,7"]
    with pytest.raises(ClusterError, match="3 GPUs cannot be shared out 2 to a target"):
        cluster._workers(["0", "1", "2"], 2)

"""Fixtures shared by all tests: random targets and a small real store, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from tiny import make_target, write_data

from dflash_offline.extract.kernels.delta_rule import pin_configurations
from dflash_offline.extract.run import Prepared, prepare, survey
from dflash_offline.extract.settings import DataSettings, ExtractSettings, TargetSettings
from dflash_offline.extract.unit import run_unit
from dflash_offline.store import Store
from dflash_offline.store.progress import SILENT

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if torch.cuda.is_available():
    pin_configurations(128)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's cache folder of the tests' own, theirs and that of every process they start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid target of 8 layers."""
    return make_target(tmp_path_factory.mktemp("targets") / "hybrid", "hybrid")


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random dense Qwen3 target of 8 layers."""
    return make_target(tmp_path_factory.mktemp("targets") / "dense", "dense")


DEVICE = "0" if torch.cuda.is_available() else "cpu"
"""Where states come from: kernels for linear attention, once installed, are used on the CPU too and fail there."""


def prepare_store(
    target: Path, files: list[Path], store: str | Path, dtype: Any = "auto", device: str = DEVICE, **changes: Any
) -> Prepared:
    """A store with a plan; `changes` go to the data or extract settings, whichever has the key."""
    data: dict[str, Any] = {"files": [str(path) for path in files]}
    extract: dict[str, Any] = {"layer_ids": [1, 3, 5], "unit_tokens": 600, "batch_tokens": 400}
    for key, value in changes.items():
        (data if key in DataSettings.model_fields else extract)[key] = value
    settings = TargetSettings(path=str(target), dtype=dtype), DataSettings(**data), ExtractSettings(**extract)
    return prepare(survey(*settings, files, store, device, SILENT))


def fill(prepared: Prepared) -> Store:
    """Do all units of a plan in this process."""
    for unit in prepared.plan.units:
        run_unit(prepared.job, unit.id)
    prepared.store.refresh()
    return prepared.store


@pytest.fixture(scope="session")
def make_store() -> Callable[..., Prepared]:
    """`prepare_store`, for tests."""
    return prepare_store


@pytest.fixture(scope="session")
def filled(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A real store of 40 conversations of the random hybrid, several parts. Not to be changed."""
    folder = tmp_path_factory.mktemp("filled")
    return fill(prepare_store(hybrid, [write_data(folder / "data.jsonl", 40, heldout=6)], folder / "states"))


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """A server that speaks S3, on loopback."""
    moto_server = pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def prefix(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of a new bucket; credentials and endpoint in the environment, as users give them."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    bucket = f"bucket-{uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/where"

"""Sweep files: what they expand to, what the runs are called, and what is refused."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as checked
from hypothesis import strategies as st
from tiny import write_data

from dflash_offline.pipelines.ablate.sweep import Sweep, read_sweep
from dflash_offline.pipelines.config import ConfigError, load_settings, toml_value
from dflash_offline.pipelines.init import init


@pytest.fixture(scope="module")
def folder(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `dflash.toml` whose drafter has a sliding and a full layer."""
    found = tmp_path_factory.mktemp("sweeps")
    write_data(found / "data.jsonl", 4)
    init(found, str(hybrid), ["data.jsonl"], [], force=False)
    return found


def read(folder: Path, text: str, *overrides: str, name: str = "s.toml") -> Sweep:
    (folder / name).write_text(text)
    return read_sweep(folder, folder / name, overrides)


def names(sweep: Sweep) -> list[str]:
    return [variant.name for variant in sweep.variants]


def test_a_grid_gives_every_combination_over_the_base(folder: Path) -> None:
    sweep = read(
        folder,
        """
        [base]
        train.epochs = 2
        loss.gamma = 9
        [grid]
        loss.gamma = [4, 7.5]
        train.seed = [0, 1]
        """,
    )
    assert (sweep.name, sweep.folder) == ("s", folder / "runs/s")
    assert names(sweep) == ["gamma=4,seed=0", "gamma=4,seed=1", "gamma=7.5,seed=0", "gamma=7.5,seed=1"]
    for variant, (gamma, seed) in zip(sweep.variants, itertools.product((4, 7.5), (0, 1)), strict=True):
        settings = variant.settings
        assert (settings.loss.gamma, settings.train.seed, settings.train.epochs) == (gamma, seed, 2)
        assert settings.train.run == f"runs/s/{variant.name}"
        assert variant.folder == folder / settings.train.run
        assert load_settings(folder, variant.overrides) == settings


def test_named_variants_and_the_grid_are_crossed(folder: Path) -> None:
    sweep = read(
        folder,
        """
        name = "shapes"
        folder = "elsewhere/shapes"
        [grid]
        train.seed = [0]
        [[variant]]
        name = "plain"
        [[variant]]
        name = "wide"
        drafter = { intermediate_size = 96, block_size = 4 }
        """,
    )
    assert (sweep.name, sweep.folder) == ("shapes", folder / "elsewhere/shapes")
    assert names(sweep) == ["plain,seed=0", "wide,seed=0"]
    plain, wide = (variant.settings.drafter for variant in sweep.variants)
    assert plain == load_settings(folder, []).drafter
    assert (wide.intermediate_size, wide.block_size) == (96, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[grid]\ndrafter.depth = [1, 2, 4]", {"depth=1": "F", "depth=2": "SF", "depth=4": "SSSF"}),
        # Over what the tables before it say, in this order: dflash.toml, base, variant, grid.
        ('[base]\ndrafter.depth = 3\n[[variant]]\nname = "x"', {"x": "SSF"}),
        ('[base]\ndrafter.depth = 3\n[[variant]]\nname = "x"\ndrafter.layer_types = ["full_attention"]', {"x": "F"}),
        (
            '[[variant]]\nname = "x"\ndrafter.layer_types = ["full_attention", "sliding_attention"]\n'
            "[grid]\ndrafter.depth = [1, 3]",
            {"x,depth=1": "S", "x,depth=3": "FFS"},
        ),
    ],
)
def test_depth_stands_for_the_layers_kinds(text: str, expected: dict[str, str], folder: Path) -> None:
    found = {
        variant.name: "".join(kind[0].upper() for kind in variant.settings.drafter.layer_types)
        for variant in read(folder, text).variants
    }
    assert found == expected


def test_overrides_go_over_the_base(folder: Path) -> None:
    text = "[base]\ntrain.epochs = 2\n[grid]\ndrafter.depth = [1, 3]"
    sweep = read(folder, text, "train.epochs=5", 'drafter.layer_types=["full_attention", "full_attention"]')
    assert [variant.settings.train.epochs for variant in sweep.variants] == [5, 5]
    assert [len(variant.settings.drafter.layer_types) for variant in sweep.variants] == [1, 3]
    assert {kind for variant in sweep.variants for kind in variant.settings.drafter.layer_types} == {"full_attention"}


def test_long_values_are_short_in_names_and_stay_apart(folder: Path) -> None:
    sweep = read(
        folder,
        """
        [grid]
        drafter.layer_types = [["sliding_attention", "sliding_attention", "full_attention"]]
        drafter.layer_ids = [[1, 3], [1, 3, 5]]
        train.init_from = ["runs/some long/folder of a/drafter", "runs/some long/folder of b/drafter"]
        train.mixture = [{ code = 1.0, chat = 3.0 }]
        """,
    )
    found = [variant.name.split(",") for variant in sweep.variants]
    assert {tuple(pieces[:2]) for pieces in found} == {
        ("layer_types=2xsliding+full", "layer_ids=1+3"),
        ("layer_types=2xsliding+full", "layer_ids=1+3+5"),
    }
    assert {pieces[3] for pieces in found} == {"mixture=code-1.0+chat-3.0"}
    assert len({pieces[2] for pieces in found}) == 2
    for variant in sweep.variants:
        assert not set(variant.name) - set(string.ascii_letters + string.digits + "_.+=,~-")
        assert load_settings(folder, variant.overrides) == variant.settings


GRID = "[grid]\nloss.gamma = [4, 7]\n"
X = '[[variant]]\nname = "x"\n'


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("", (), "nothing to compare"),
        ("[grid]\nloss.gamme = [4]", (), r"s\.toml, \[grid\]: unknown key loss\.gamme; did you mean loss\.gamma\?"),
        ("[grid]\ndrafter.dept = [4]", (), r"did you mean drafter\.depth\?"),
        ("[base]\ntrain.gamma = 4\n" + GRID, (), r"\[base\]: unknown key train\.gamma; did you mean loss\.gamma\?"),
        ("[gird]\nloss.gamma = [4]", (), r"unknown key gird; did you mean grid\?"),
        ("train.epochs = 2\n" + GRID, (), r"write train's settings below \[base\], \[grid\] or \[\[variant\]\]"),
        ("[grid]\nloss.gamma = 4", (), r"grid\.loss\.gamma: .*valid list, not 4"),
        ("[grid]\nloss.gamma = []", (), r"grid\.loss\.gamma: .*at least 1 item"),
        ('[variant]\nname = "x"', (), r"write \[\[variant\]\]"),
        ("[[variant]]\nloss.gamma = 4", (), r"variant\.1\.name: Field required"),
        ('[[variant]]\nname = "a/b"', (), "'a/b' is a folder's"),
        ('[[variant]]\nname = ".."', (), "is a folder's"),
        ('name = "../up"\n' + GRID, (), "is a folder's"),
        (X + X, (), "two variants are named x"),
        (GRID + X + "loss.gamma = 3", (), r"both \[grid\] and variant x say loss\.gamma"),
        (GRID + 'store.path = ["a"]', (), r"\[grid\]: store\.path cannot vary, for all runs of a sweep train from one"),
        (X + "extract.final = true", (), r"variant x: extract\.final cannot vary"),
        (X + 'train.run = "there"', (), r"variant x: train\.run is not for a sweep"),
        (GRID, ("train.run=there",), r"train\.run is not for a sweep.*set `folder`"),
        (GRID, ("loss.gamma=3",), r"--set loss\.gamma: it varies in this sweep, by \[grid\]"),
        (GRID, ("loss.gamme=3",), r"did you mean loss\.gamma\?"),
        ("[grid]\nloss.gamma = [4, -1]", (), r"variant gamma=-1: loss\.gamma: .*greater than 0, not -1"),
        ("[grid]\ndrafter.depth = [0]", (), r"variant depth=0: drafter\.depth is a number of layers from 1 on, not 0"),
        ("[grid]\ndrafter.depth = [1]\ndrafter.layer_types = [[]]", (), r"say one of them"),
        ("[grid]\nloss.gamma = [4, 4.0]", (), r"lists 4\.0 twice for loss\.gamma"),
        (X + '[[variant]]\nname = "y"\ndrafter.depth = 2', (), "x and y are the same settings"),
        ("[grid]\nloss.gamma = [4, 4]", (), "lists 4 twice for loss.gamma"),
        ("[grid\n", (), "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(text: str, overrides: tuple[str, ...], says: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read(folder, text, *overrides)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_file_of_another_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no sweep file .*none\.toml"):
        read_sweep(folder, folder / "none.toml", [])
    assert read(folder, GRID, name="my sweep 1.toml").name == "my-sweep-1"


TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x7f"), max_size=12)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@checked(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    import tomllib

    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value

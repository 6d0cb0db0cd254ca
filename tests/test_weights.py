"""Loading through a cache of converted weights: the same trees, from the file exactly when nothing has changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msds
from msds.checkpoint import Checkpoint, ShardCache
from msds.config import read_config
from msds.errors import CheckpointError, OptionError
from msds.models.specs.placement import ExpertPlacement
from msds.pretrained import DEFAULT_MODEL
from msds.weights import open_shard_cache, without_mtp
from msds_graphs.plan import Plan
from msds_graphs.ranks import Ranks
from msds_graphs.sharding import ShardPlan
from msds_graphs.trees import tree_items, tree_map
from tests.layouts.training import mindformers, write_ranks

Tiny = Callable[..., Path]


def contents(model: msds.Model) -> dict[str, tuple[str, bytes]]:
    return {path: (str(leaf.dtype), leaf.asnumpy().tobytes()) for path, leaf in tree_items(model.params)}


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the checkpoint was converted again")


def placed(experts: int = 16, layers: int = 3) -> tuple[ExpertPlacement, ...]:
    """Experts in reverse order over two ranks, the first one on both."""
    rows = tuple(reversed(range(experts)))
    half = experts // 2
    slots = ((*rows[:half], 0), (*rows[half:-1], 0, rows[0]))
    return (ExpertPlacement(experts, slots),) * layers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v3_base", {}),
        ("v3_base", {"mtp": False}),
        ("v3_base", {"ranks": Ranks(ShardPlan(tp=2, ep=2), 1)}),
        ("v3_base", {"ranks": Ranks(ShardPlan(dp=2, ep=2), 0), "placements": placed()}),
        ("v3_fp8", {}),
        ("qwen2_tied", {"ranks": Ranks(ShardPlan(tp=2), 0)}),
        ("llama_base", {}),
        ("tiny-r1", {}),
    ],
)
def test_the_tree_of_a_file_is_that_of_the_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Bit for bit, derived leaves and tables of placements included, and read without converting anything."""
    folder = DEFAULT_MODEL if name == "tiny-r1" else tiny(name)
    plain = contents(msds.load(folder, **options))
    assert contents(msds.load(folder, shard_cache=tmp_path, **options)) == plain
    monkeypatch.setattr("msds.model.load_weights", never)
    assert contents(msds.load(folder, shard_cache=tmp_path, **options)) == plain
    assert len(list(tmp_path.iterdir())) == 1


def test_ranks_have_files_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    for rank in range(2):
        msds.load(tiny("v3_base"), ranks=Ranks(ShardPlan(tp=2), rank), shard_cache=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split(".tp2.")[1][:5] for name in names] == ["rank0", "rank1"]


def test_a_damaged_file_is_made_anew(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny("v3_base")
    plain = contents(msds.load(folder, shard_cache=tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert contents(msds.load(folder, shard_cache=tmp_path)) == plain
    assert "made anew" in caplog.text
    assert path.read_bytes() == whole


def test_an_engine_reads_the_file_and_its_weights_can_be_replaced(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("v3_base")
    msds.load(folder, mtp=False, shard_cache=tmp_path)
    monkeypatch.setattr("msds.model.load_weights", never)
    model = msds.LLM(folder, shard_cache=tmp_path, max_model_len=64).model
    before = contents(model)
    tree = tree_map(lambda spec: np.full(spec.shape, 0.5, spec.dtype), model.functions.spec(model.config))
    model.update_weights(tree)
    after = contents(model)
    assert after.keys() == before.keys()
    assert all(after[path] != before[path] for path in after)
    assert contents(msds.load(folder, mtp=False, shard_cache=tmp_path)) == before  # the file is not the weights' memory


INGREDIENTS = ["file", "time", "config", "dtype", "plan", "rank", "placements", "implementation", "version", "format"]


@pytest.fixture
def model_folder(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("v3_base"), tmp_path / "model"))


def opened(folder: Path, caches: Path, changed: str = "") -> ShardCache:
    """The cache of rank 0 of two; changed: which ingredient is another."""
    config = without_mtp(read_config(folder))
    if changed == "config":
        config = replace(config, rms_norm_eps=1e-7)
    shards = ShardPlan(dp=2) if changed == "plan" else ShardPlan(dp=2, ep=2)
    plan = Plan(
        {"moe_experts": "reference"} if changed == "implementation" else {}, Ranks(shards, int(changed == "rank"))
    )
    placements = placed(layers=2) if changed == "placements" else ()
    checkpoint = Checkpoint.open(folder)
    try:
        dtype = "bfloat16" if changed == "dtype" else "float32"
        found = open_shard_cache(caches, checkpoint, config, dtype, plan, placements)
    finally:
        checkpoint.close()
    assert found is not None
    return found


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_everything_that_shapes_a_shard_is_in_its_key(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingredient: str
) -> None:
    before = opened(model_folder, tmp_path / "caches")
    assert opened(model_folder, tmp_path / "caches") == before
    path = model_folder / "model.safetensors"
    if ingredient == "file":
        path.rename(model_folder / "other.safetensors")
    elif ingredient == "time":
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    elif ingredient == "version":
        monkeypatch.setattr("msds.weights.__version__", "9")
    elif ingredient == "format":
        monkeypatch.setattr("msds.checkpoint.shard_cache.FORMAT", 9)
    after = opened(model_folder, tmp_path / "caches", ingredient)
    assert after.key != before.key
    assert after.path != before.path


def test_training_checkpoints_are_cached_by_all_their_files(tiny: Tiny, tmp_path: Path) -> None:
    """Every rank's part counts, though one of them is enough to name a tensor's place."""
    folder, caches = tmp_path / "trained", tmp_path / "caches"
    write_ranks(mindformers(tiny("llama_base")), folder)
    shutil.copy(tiny("llama_base") / "config.json", folder)
    plain = contents(msds.load(folder))
    for _ in range(2):
        assert contents(msds.load(folder, shard_cache=caches)) == plain
    assert len(list(caches.iterdir())) == 1
    for part in (path for path in sorted(folder.rglob("*.safetensors"))):
        os.utime(part, ns=(0, part.stat().st_mtime_ns + 1))
        (before,) = caches.iterdir()
        msds.load(folder, shard_cache=caches)
        (after,) = caches.iterdir()
        assert after != before


WANTED_TOGETHER: list[dict[str, Any]] = [
    {"mtp": False},
    {},
    {"plan": Plan({"moe_experts": "reference"})},
    {"ranks": Ranks(ShardPlan(tp=2, ep=2), 0)},
    {"ranks": Ranks(ShardPlan(tp=2, ep=2), 1)},
    {"ranks": Ranks(ShardPlan(dp=2, ep=2), 0)},
    {"ranks": Ranks(ShardPlan(tp=2, ep=2), 0), "placements": placed()},
]


def test_one_file_for_each_way_to_load_a_folder_and_one_folder(
    tiny: Tiny, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wanted by turns stays; a checkpoint that has changed has its old files removed, and no other has."""
    caches, twin = tmp_path / "caches", Path(shutil.copytree(model_folder, tmp_path / "elsewhere" / "model"))
    for options in WANTED_TOGETHER:
        msds.load(model_folder, shard_cache=caches, **options)
    msds.load(twin, shard_cache=caches)
    kept = set(caches.iterdir())
    assert len(kept) == len(WANTED_TOGETHER) + 1
    path = model_folder / "model.safetensors"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    for count, options in enumerate(WANTED_TOGETHER, start=1):
        msds.load(model_folder, shard_cache=caches, **options)
        assert len(kept & set(caches.iterdir())) == len(kept) - count
        assert len(set(caches.iterdir())) == len(kept)
    monkeypatch.setattr("msds.model.load_weights", never)
    msds.load(twin, shard_cache=caches)
    for options in WANTED_TOGETHER:
        msds.load(model_folder, shard_cache=caches, **options)


def test_what_cannot_be_a_cache_is_refused_at_once(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("llama_base")
    with pytest.raises(OptionError, match="the model's own folder"):
        msds.load(folder, shard_cache=folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="no folder and cannot become one"):
        msds.load(folder, shard_cache=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "empty")
    with pytest.raises(OptionError, match="shard_cache is ''"):
        msds.load(tmp_path / "empty", shard_cache="")  # before weights are looked for


def test_a_damaged_checkpoint_is_an_error_though_its_shard_is_there(model_folder: Path, tmp_path: Path) -> None:
    caches = tmp_path / "caches"
    msds.load(model_folder, shard_cache=caches)
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        msds.load(model_folder, shard_cache=caches)

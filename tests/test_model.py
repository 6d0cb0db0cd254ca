"""load: what it refuses, what it checks, and what the MTP option means."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import msds
from msds.checkpoint import write_manifest
from msds.errors import CheckpointError, OptionError, PromptError

Tiny = Callable[..., Path]


def test_mtp_layers_are_loaded_when_stored(tiny: Tiny) -> None:
    folder = tiny("v3_base")
    assert len(msds.load(folder).params["mtp"]) == 1
    assert msds.load(folder, mtp=False).params["mtp"] == ()
    assert msds.load(folder, mtp=False).config.num_nextn_predict_layers == 0


def test_wanting_absent_mtp_layers_is_an_error(tiny: Tiny) -> None:
    with pytest.raises(CheckpointError, match=r"no MTP layer .*eh_proj"):
        msds.load(tiny("v3_no_mtp"), mtp=True)
    with pytest.raises(CheckpointError, match="no MTP layer"):
        msds.load(tiny("llama_base"), mtp=True)


def test_digests_are_checked_when_a_manifest_is_there(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama_base"), tmp_path / "model"))
    with pytest.raises(CheckpointError, match="no sha256 manifest"):
        msds.load(folder, check_sha256=True)
    write_manifest(folder)
    msds.load(folder)
    text = (folder / "generation_config.json").read_text()
    (folder / "generation_config.json").write_text(text + " ")
    with pytest.raises(CheckpointError, match=r"generation_config\.json has sha256"):
        msds.load(folder)
    msds.load(folder, check_sha256=False)


def test_plans_are_checked(tiny: Tiny) -> None:
    with pytest.raises(OptionError, match=r"'attend'.*cache_write, moe_experts"):
        msds.load(tiny("llama_base"), plan=msds.Plan({"attend": "portable"}))
    with pytest.raises(OptionError, match="moe_experts has no 'ascendc'"):
        msds.load(tiny("llama_base"), plan=msds.Plan({"moe_experts": "ascendc"}))


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        ([], None, "at least one"),
        ([1, -1], None, "-1 at position 1"),
        ([1, 2.0], None, r"2\.0 at position 1"),
        ([1, True], None, "True at position 1"),
        ([1, 2], [0], "as many"),
        ([1, 2], [1, 1], "ascending"),
        ([1, 2], [0, 10**6], "1000000 is outside"),
    ],
)
def test_logits_refuse_bad_ids(tiny: Tiny, ids: list[int], positions: list[int] | None, message: str) -> None:
    model = msds.load(tiny("llama_base"))
    with pytest.raises(PromptError, match=message):
        model.logits(ids, positions)

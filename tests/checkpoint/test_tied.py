"""Tied or stored output heads: four cases, decided by config and files."""

import warnings

import numpy as np
import pytest

from msds.checkpoint import Checkpoint, CheckpointWarning, shares_embedding, tensor_source, write_checkpoint
from msds.errors import CheckpointError

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def stored(folder, head):
    sources = [tensor_source(EMBED, VALUES)]
    if head is not None:
        sources.append(tensor_source(HEAD, head))
    write_checkpoint(folder, sources, max_shard_bytes=1)
    return Checkpoint.open(folder)


def test_tied_and_absent_is_shared(tmp_path):
    assert shares_embedding(stored(tmp_path, None), True)


def test_untied_and_absent_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight.*tie_word_embeddings false"):
        shares_embedding(stored(tmp_path, None), False)


def test_untied_and_present_is_its_own(tmp_path):
    assert not shares_embedding(stored(tmp_path, VALUES), False)


def test_tied_and_present_keeps_one(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shares_embedding(stored(tmp_path, VALUES), True)


@pytest.mark.parametrize("head", [VALUES + 1, VALUES[:2]])
def test_tied_and_present_but_different_warns(tmp_path, head):
    with pytest.warns(CheckpointWarning, match=r"lm_head\.weight differs"):
        assert shares_embedding(stored(tmp_path, head), True)


def test_a_head_in_a_missing_shard_is_left_to_the_check(tmp_path):
    stored(tmp_path, VALUES)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    checkpoint = Checkpoint.open(tmp_path)
    assert not shares_embedding(checkpoint, False)
    assert HEAD in checkpoint.faults[0]

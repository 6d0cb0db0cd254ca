"""generation_config.json: ids that end a text, sampling defaults, refusals."""

from pathlib import Path
from typing import Any

import pytest

from msds.config import (
    read_generation_config,
)
from msds.errors import ConfigError
from tests.config.samples import LLAMA, write


def test_generation_config_joins_the_ids_that_end_a_text(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert read_generation_config(tmp_path).eos_token_ids == (2, 3)
    generation = {
        "_from_model_config": True,
        "bos_token_id": 1,
        "do_sample": True,
        "eos_token_id": [3, 7],
        "no_repeat_ngram_size": 3,
        "repetition_penalty": None,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.39.3",
    }
    config = read_generation_config(write(tmp_path, generation, "generation_config.json"))
    assert config.eos_token_ids == (2, 3, 7)
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.6, 0.95, 20)
    assert (config.min_p, config.repetition_penalty) == (None, None)
    assert config.not_applied == ("no_repeat_ngram_size",)


def test_a_folder_without_either_file_says_nothing(tmp_path: Path) -> None:
    config = read_generation_config(tmp_path)
    assert config.eos_token_ids == ()
    assert config.temperature is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": "0.6"}, 'temperature = "0.6"'),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"top_p": 1.5}, "top_p = 1.5.*at most 1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_k": 2.5}, "top_k = 2.5"),
        ({"do_sample": "yes"}, 'do_sample = "yes"'),
        ({"repetition_penalty": 0}, "repetition_penalty = 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id = "),
    ],
)
def test_a_faulty_generation_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_generation_config(write(tmp_path, changes, "generation_config.json"))

"""The real models, converted once per machine and kept in pytest's cache."""

from __future__ import annotations

import os

import pytest

from tests.real.fetch import QWEN_CODER, SMOLLM2, DownloadError, RealModel, model_folder
from tests.real.pairs import Pair, compare


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(SMOLLM2, id=SMOLLM2.name),
        pytest.param(QWEN_CODER, id=QWEN_CODER.name, marks=pytest.mark.slow),
    ],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    """One model, run by msds and by transformers on the same prompts.

    Without the network the tests are skipped, except where CI says that they must run.
    """
    model: RealModel = request.param
    try:
        folder = model_folder(model, request.config.cache.mkdir("real-models"))
    except DownloadError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{error} (CI is true, so this is not skipped)", pytrace=False)
        pytest.skip(str(error))
    return compare(model, folder)

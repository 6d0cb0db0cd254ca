"""What the README shows runs as written."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"


def _block(heading: str) -> str:
    """The first Python block under a heading."""
    section = README.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    match = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert match is not None
    return match[1]


def test_compile_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "readme_example.py").write_text(_block("Compile your own function"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module("readme_example")
    printed = capsys.readouterr().out
    assert "T=8" in printed
    assert "(5, 4)" in printed
    mean = example.step.donated["mean"].asnumpy()
    np.testing.assert_allclose(mean, np.full(4, 0.1, np.float32), rtol=1e-6)


def test_the_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(_block("Ten lines"), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "The answer is 132. stop Usage(" in printed
    assert "(3, 512)" in printed


def test_the_file_lists_every_command() -> None:
    from msds_serve.cli import _parser

    commands = _parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    table = README.read_text(encoding="utf-8").split("## Command line", 1)[1].split("##", 1)[0]
    for command in commands:
        assert f"`msds {command} " in table

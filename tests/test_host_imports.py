"""Host code starts fast: importing it, or asking the command for help, never imports MindSpore."""

import subprocess
import sys

import pytest

HOST_MODULES = [
    "msds",
    "msds.checkpoint",
    "msds.config",
    "msds.doctor",
    "msds.engine.engine",
    "msds.engine.ranks",
    "msds.engine.runner",
    "msds.inspect",
    "msds.launch",
    "msds.launch.child",
    "msds.launch.team",
    "msds.llm",
    "msds.model",
    "msds.models.specs.parts",
    "msds.models.specs.placement",
    "msds.models.specs.rules",
    "msds.planning",
    "msds.presets",
    "msds.text.chat",
    "msds.text.reasoning",
    "msds.text.tools",
    "msds.text.tokenizer",
    "msds.verify",
    "msds_graphs",
    "msds_graphs.buckets",
    "msds_graphs.mesh",
    "msds_graphs.plan",
    "msds_graphs.ranks",
    "msds_graphs.sharding",
    "msds_graphs.specs",
    "msds_graphs.trees",
    "msds_ops",
    "msds_ops.random",
    "msds_serve.bench",
    "msds_serve.cli",
    "msds_serve.client",
    "msds_serve.protocol.openapi",
    "msds_serve.protocol.requests",
    "msds_serve.protocol.responses",
    "msds_serve.protocol.streaming",
]


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(n for n in sys.modules if '.' not in n))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_host_modules_do_not_import_mindspore() -> None:
    loaded = _loaded_after("; ".join(f"import {name}" for name in HOST_MODULES))
    assert "msds_serve" in loaded
    assert loaded.isdisjoint({"mindspore", "torch", "transformers"})


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_command_line_answers_without_heavy_imports(flag: str) -> None:
    statement = (
        f"import contextlib\nfrom msds_serve.cli import main\nwith contextlib.suppress(SystemExit): main(['{flag}'])"
    )
    loaded = _loaded_after(statement)
    assert loaded.isdisjoint({"mindspore", "numpy", "tokenizers", "jinja2"})


def test_every_public_name_resolves() -> None:
    import msds

    for name in msds.__all__:
        assert getattr(msds, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        _ = msds.generate

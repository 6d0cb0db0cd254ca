"""The package's front: names resolve lazily, and host code runs without MindSpore."""

from __future__ import annotations

import subprocess
import sys

import pytest

import msds_graphs

HOST = ["ArraySpec", "Bucket", "GraphError", "Plan", "Tree", "TreeDef", "UnplannedShapeError", "init_tree", "ladder"]


def test_every_name_resolves() -> None:
    for name in dir(msds_graphs):
        assert getattr(msds_graphs, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = msds_graphs.nonsense


def test_host_code_does_not_import_mindspore() -> None:
    code = f"""
import sys, msds_graphs
import msds_graphs.batch, msds_graphs.results
for name in {HOST} + [name for name in dir(msds_graphs) if name.startswith("tree_")]:
    getattr(msds_graphs, name)
raise SystemExit("mindspore" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

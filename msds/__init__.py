"""DeepSeek on Ascend as pure functions.

`LLM` generates, `load` gives the tree and the functions, `compile` turns any pure function over trees into static
graphs. Names are resolved on first use: importing msds imports no MindSpore.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msds.engine.sequence import Output as Output
    from msds.errors import MsdsError as MsdsError
    from msds.llm import LLM as LLM
    from msds.model import Model as Model
    from msds.model import load as load
    from msds.pretrained import DEFAULT_MODEL as DEFAULT_MODEL
    from msds.sampling import SamplingParams as SamplingParams
    from msds_graphs.compile import compile as compile
    from msds_graphs.plan import Plan as Plan
    from msds_graphs.ranks import Ranks as Ranks
    from msds_graphs.sharding import ShardPlan as ShardPlan
    from msds_graphs.specs import ArraySpec as ArraySpec

__version__ = "0.1.0"

_HOMES = {
    "DEFAULT_MODEL": "msds.pretrained",
    "LLM": "msds.llm",
    "Model": "msds.model",
    "MsdsError": "msds.errors",
    "load": "msds.model",
    "Output": "msds.engine.sequence",
    "SamplingParams": "msds.sampling",
    "compile": "msds_graphs.compile",
    "Plan": "msds_graphs.plan",
    "Ranks": "msds_graphs.ranks",
    "ShardPlan": "msds_graphs.sharding",
    "ArraySpec": "msds_graphs.specs",
}

__all__ = [
    "DEFAULT_MODEL",
    "LLM",
    "ArraySpec",
    "Model",
    "MsdsError",
    "Output",
    "Plan",
    "Ranks",
    "SamplingParams",
    "ShardPlan",
    "__version__",
    "compile",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'msds' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

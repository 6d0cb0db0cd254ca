"""Will a model fit a mesh, how, and about how fast: from its config alone, before anything is loaded or run."""

from msds.planning.demand import Demand, make_demand
from msds.planning.planner import make_plan
from msds.planning.report import PlanReport

__all__ = ["Demand", "PlanReport", "make_demand", "make_plan"]

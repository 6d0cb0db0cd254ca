"""Several processes as one program: started, watched and ended together, and rank 0 telling the others what to run."""

from msds.launch.cluster import SECRET_VARIABLE, Cluster
from msds.launch.place import Place
from msds.launch.processes import launch

__all__ = ["SECRET_VARIABLE", "Cluster", "Place", "launch"]

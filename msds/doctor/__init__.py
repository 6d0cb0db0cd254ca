"""Preflight: is this machine, its software and a checkpoint fit to serve? Reads and asks only, changes nothing."""

from msds.doctor.examine import examine
from msds.doctor.report import DoctorReport
from msds.doctor.system import System

__all__ = ["DoctorReport", "System", "examine"]

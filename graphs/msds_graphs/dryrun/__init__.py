"""Compiling for Ascend without hardware: stub libraries, a process that compiles and never computes, what it read."""

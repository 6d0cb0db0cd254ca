"""Compiling a model for Ascend without hardware, one process per rank, and checking what its graphs say."""

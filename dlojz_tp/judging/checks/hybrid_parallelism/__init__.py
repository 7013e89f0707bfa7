"""Checks of 19_hybrid_parallelism: the mesh, a step over it, memory, time, and the search for a layout."""

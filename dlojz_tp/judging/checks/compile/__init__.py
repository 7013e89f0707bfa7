"""Checks of 06_compile: a C library, memory traffic, graph breaks, recompilations, the break-even, a compiled step."""

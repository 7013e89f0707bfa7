"""Run by each kernel that `lab` starts: a cell that comes too early gets one calm line. Leaves no name behind."""

__import__("importlib").import_module("dlojz_tp.cards.calm").install()

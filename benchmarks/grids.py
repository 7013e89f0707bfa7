"""Hold work 19's predictions against this machine: bytes of a rank and the order of six grids of 8 ranks; and ten runs.

    python benchmarks/grids.py

Runs the code cells of the solution, without its checks and figures; about half a minute where nothing else runs.
"""

from dlojz_tp.works import source

if __name__ == "__main__":
    names = {"__name__": "__main__"}  # its functions go to ranks by value
    for cell in source.find("19_hybrid_parallelism").cells:
        if cell.kind == "code" and not any(word in cell.text for word in ("tp.check(", "plt.show()", "tp.progress()")):
            exec(compile(source.without_markers(cell.text), "<19_hybrid_parallelism>", "exec"), names)

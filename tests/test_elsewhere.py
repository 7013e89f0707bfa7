"""A notebook of the course in a kernel that `lab` has not started: as on Colab, on Kaggle, in another program."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from conftest import kernel_without_ports
from dlojz_tp.works import source

# a launcher of its own, whose module stays imported, and a module of the place
LAUNCHER = """
if __name__ == "__main__":
    import os, sys, types
    sys.modules["google"], sys.modules["google.colab"] = types.ModuleType("google"), types.ModuleType("google.colab")
    sys.path[:] = [path for path in sys.path if path]
    os.close(0)
    from ipykernel import kernelapp
    kernelapp.launch_new_instance()
"""
KERNEL = {"display_name": "elsewhere", "language": "python"}
SMALL = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"']


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A function: runs code cells in such a kernel, in a folder that is no work folder; what each cell printed.

    Its home cannot be written, its modules come by PYTHONPATH, and where that can be done /dev/shm holds 64 MB.
    """
    (tmp_path / "content").mkdir()
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "colab_kernel_launcher.py").write_text(LAUNCHER)
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/env/python", str(source.ROOT)]))
    for name in ("DLOJZ_STRICT", "PYTHONSTARTUP", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    small = shutil.which("unshare") and not subprocess.run([*SMALL, "true"], capture_output=True).returncode
    command = [sys.executable, str(tmp_path / "place" / "colab_kernel_launcher.py"), "-f", "{connection_file}"]

    def run(*cells):
        manager = kernel_without_ports()
        manager._kernel_spec = manager.kernel_spec_manager.kernel_spec_class(
            argv=[*(SMALL if small else []), *command], **KERNEL
        )
        monkeypatch.delenv("DLOJZ_STATE")  # the manager has made its folder there
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        place = {"metadata": {"path": str(tmp_path / "content")}}
        NotebookClient(notebook, km=manager, timeout=200, resources=place).execute()
        return ["".join(_text(output) for output in cell.outputs) for cell in notebook.cells]

    return run


def _text(output):
    return output.get("text") or output["data"]["text/plain"]


def test_verdicts_ranks_and_loader_workers(elsewhere):
    work = source.find("00_welcome")
    first, second = (source.without_markers(balise.code) for balise in work.balises.values())
    setup = "\n".join(cell.text for cell in work.cells if "setup" in cell.options)
    said = elsewhere(
        setup,
        f"{first}\n\ntp.check(1, {', '.join(work.balises[1].answers)})",
        f"{second}\n\ntp.check(2, {', '.join(work.balises[2].answers)})",
        "import torch\n\n\ndef mine(pair):\n    return sum(pair)\n\n\n"
        "pairs = torch.utils.data.DataLoader([(k, k) for k in range(8)], None, num_workers=2)\n"
        "print([mine(pair) for pair in pairs])\nimport os\nprint(sorted(os.listdir()))",
    )
    assert "★ balise 1 " in said[1] and "★ balise 2 " in said[2] and "✗" not in "".join(said), said
    assert f"{[2 * k for k in range(8)]}" in said[3] and "[]" in said[3], "nothing is written in the folder at hand"
    told = [line for text in said for line in text.splitlines() if "cannot be written" in line]
    assert len(told) == 1 and "until this kernel ends" in told[0], "progress that is not kept is told once"


def test_a_package_without_its_checkout_says_how_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "SOLUTIONS", tmp_path)
    monkeypatch.setattr(source, "NOTEBOOKS", tmp_path / "notebooks")
    with pytest.raises(source.UnknownWork, match=r"no folder notebooks/ .*`pip install --editable"):
        source.find("00_welcome")


@pytest.mark.parametrize("system, status", [("win32", 1), ("darwin", 0)])
def test_other_systems_are_told_in_one_line(monkeypatch, capsys, system, status):
    from dlojz_tp import __main__ as program

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setitem(program.COMMANDS, "plan", ("tests.test_elsewhere", "does nothing"))
    monkeypatch.setattr(sys.modules[__name__], "main", lambda argv: 0, raising=False)
    assert program.main(["plan"]) == status
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and ("WSL 2" in told[0]) == (system == "win32"), told

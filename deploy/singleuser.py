#!/usr/bin/env python3
"""What the hub starts for a trainee: the course's JupyterLab, in a folder of the trainee's own.

singleuser.py WORK [arguments of jupyterhub-singleuser]; its Python is that of `.venv-hub`, kernels run in the course's.
"""

import os
import sys
from pathlib import Path

os.umask(0o077)  # nobody reads what others write
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dlojz_tp.commands import lab  # noqa: E402
from dlojz_tp.data import folders  # noqa: E402

COURSE = Path(sys.prefix.removesuffix("-hub"))  # the environment beside: it has JupyterLab


def main():
    """Bring the notebooks, then serve them."""
    work = folders.resolve(Path(os.path.expandvars(sys.argv.pop(1))), "work")
    work.mkdir(parents=True, exist_ok=True)
    work.chmod(0o700)
    os.environ.setdefault("JUPYTERLAB_DIR", str(COURSE / "share" / "jupyter" / "lab"))
    os.environ["JUPYTER_CONFIG_PATH"] = str(COURSE / "etc" / "jupyter")
    for line in lab.bring(work):
        print(line, flush=True)
    lab.prepare(work)
    os.environ["JUPYTERHUB_DEFAULT_URL"] = lab.PAGE
    sys.argv += lab.settings(work)
    from jupyterhub.singleuser import main as serve

    serve()


if __name__ == "__main__":
    main()

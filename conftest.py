"""For all tests and notebooks: nothing is written outside the checkout, and a wrong verdict is an error."""

import atexit
import os
import shutil
import tempfile

if "DLOJZ_STATE" not in os.environ:  # the first process makes the folder and removes it; its workers inherit it
    os.environ["DLOJZ_STATE"] = tempfile.mkdtemp(prefix="dlojz-state-")
    atexit.register(shutil.rmtree, os.environ["DLOJZ_STATE"], ignore_errors=True)
os.environ.setdefault("DLOJZ_STRICT", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers share the cores: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

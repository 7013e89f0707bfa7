"""For all tests and notebooks: nothing is written outside the checkout, and a wrong verdict is an error."""

import os
import tempfile

os.environ.setdefault("DLOJZ_STATE", tempfile.mkdtemp(prefix="dlojz-state-"))
os.environ.setdefault("DLOJZ_STRICT", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers share the cores: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

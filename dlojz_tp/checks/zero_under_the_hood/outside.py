"""What is said of a copy that no tensor holds."""

from dlojz_tp.checking import Wrong

HINTS = {
    "copy-outside": "This rank keeps {found} bytes in NumPy arrays, lists or bytes, where the whole makes {whole}. A copy outside "
    "of tensors is a copy all the same: hold no more than this rank's shard, and the parameters where the stage keeps them.",
}


def no_copy(found: int, whole: int, where: str):
    """Raise Wrong where what an Outside found is more than a shard of two ranks."""
    if found > 0.6 * whole:
        raise Wrong("copy-outside", found=found, whole=whole, where=where)

"""What the errors mean that hooks and buckets of gradients raise."""

from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import NO_HANDLE, PLACED_TWICE

HINTS = {
    "placed-again": "A gradient was placed into its bucket a second time (KeyError in place). After finish(), "
                    "every bucket must be missing all its parameters again. A lambda made in a loop over p uses "
                    "the loop's last p: use the argument that the hook receives.",
    "hook-too-early": "A gradient was still None when your code used it. In a hook of register_hook, p.grad does "
                      "not hold the new gradient yet; a hook of register_post_accumulate_grad_hook runs when it "
                      "does. A bucket may start only when its last gradient has arrived. Register self.ready, "
                      "without brackets.",
    "missing-no-set": "bucket.missing must be a set again: {error}. A list compares tensors element by element to "
                      "find one.",
}  # fmt: skip
KNOWN = (
    NO_HANDLE,
    ("Boolean value of Tensor", "missing-no-set"),
    (PLACED_TWICE[0], "placed-again"),
    ("NoneType", "hook-too-early"),
    (("KeyError: ", ", in ready\n"), "hook-too-early"),
)

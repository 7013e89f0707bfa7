"""What answers to balises 1, 2 share."""

SCALE = 'scale_grads=reduction == "mean"'

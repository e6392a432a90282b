"""The precision ``fp16_mixed``: float16 with float32 masters and a scaled loss.

Masters are the weights that the optimizer updates. Small gradients would vanish in float16, so that
the loss is scaled up before the backward pass, and gradients down again before the update. Loaded
in float32, because float16 masters cannot be unscaled.

https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from pytest_distcompat.precisions._base import Precision

FP16_MIXED = Precision(
    "fp16_mixed",
    load="float32",
    compute="float16",
    master="float32",
    meaning=(
        "loaded in float32, computed in float16 under a scaled loss, "
        "master weights and optimizer state in float32"
    ),
    # 7e-5 and 2e-3 measured; bfloat16 has three bits less.
    loss_tolerance=0.0005,
    norm_tolerance=0.005,
    order=3,
)

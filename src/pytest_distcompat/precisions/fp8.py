"""The precision ``fp8``: linear layers multiply in 8 bits, all else in bfloat16, masters float32.

Masters are the weights that the optimizer updates.

With torchao or Transformer Engine:
https://huggingface.co/docs/accelerate/usage_guides/low_precision_training
"""

from pytest_distcompat.precisions._base import Precision

FP8 = Precision(
    "fp8",
    load="float32",
    compute="bfloat16",
    master="float32",
    meaning=(
        "linear layers multiply in 8 bits, all else in bfloat16, "
        "master weights and optimizer state in float32"
    ),
    # Relative to a reference in float32 3e-3 (loss) and 4e-2 (norm of gradients) were measured,
    # with tied embeddings 9e-2.
    loss_tolerance=5e-3,
    norm_tolerance=1.5e-1,
    float8=True,
    order=4,
)

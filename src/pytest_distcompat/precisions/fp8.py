"""The precision ``fp8``: linear layers multiply in 8 bits, all else in bfloat16, masters float32.

Masters are the weights that the optimizer updates.

By torchao or Transformer Engine, as option ``fp8_backend`` of a cell says:
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
    # Measured relative to a reference in float32: losses 3e-3 off, gradient norms 4e-2, and 9e-2
    # with tied embeddings. The tolerances leave a margin.
    loss_tolerance=5e-3,
    norm_tolerance=1.5e-1,
    float8=True,
    order=4,
)

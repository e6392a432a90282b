"""The precision ``fp32``: everything in float32."""

from pytest_distcompat.precisions._base import Precision

FP32 = Precision(
    "fp32",
    load="float32",
    compute="float32",
    master="float32",
    meaning="everything in float32",
    # Sums in another order: 1e-6 and 2e-5 measured.
    loss_tolerance=2e-5,
    norm_tolerance=2e-4,
    order=0,
)

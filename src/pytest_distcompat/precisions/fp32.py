"""Everything in float32."""

from pytest_distcompat.precisions._base import Precision

FP32 = Precision("fp32", load="float32", compute="float32", master="float32", meaning="everything in float32", order=0)

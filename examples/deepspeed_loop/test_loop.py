"""The whole adoption: a driver and a matrix."""

from pytest_distcompat import CompatSuite, Matrix


class TestLoop(CompatSuite):
    driver = "loop_driver:LoopDriver"
    matrix = Matrix(strategies=("zero1", "zero3"), precisions=("fp32", "bf16_upcast"))

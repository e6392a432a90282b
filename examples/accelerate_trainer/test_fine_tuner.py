"""The whole adoption: a driver and a matrix."""

from pytest_distcompat import CompatSuite, Matrix


class TestFineTuner(CompatSuite):
    driver = "fine_tuner_driver:FineTunerDriver"
    matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("fp32", "bf16_upcast"))

"""The whole adoption: a driver and a matrix."""

from pytest_distcompat import CompatSuite, Matrix


class TestAccuracyTrainer(CompatSuite):
    driver = "accuracy_driver:AccuracyDriver"
    matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("fp32", "bf16_upcast"))

"""The whole adoption: a driver and a matrix."""

from pytest_distcompat import CompatSuite, Matrix


class TestFabricLoop(CompatSuite):
    driver = "fabric_driver:FabricDriver"
    matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("fp32", "bf16_upcast", "bf16_pure"))

"""The whole adoption: a driver, a matrix, what is not supported."""

from pytest_distcompat import CompatSuite, Matrix, refuses


class TestMyTrainer(CompatSuite):
    driver = "my_driver:MyDriver"
    matrix = Matrix(strategies=("ddp", "fsdp2", "fsdp1"), precisions=("fp32", "bf16_upcast"))
    expect = (refuses(strategy="fsdp1", match="does not support strategy 'fsdp1'"),)

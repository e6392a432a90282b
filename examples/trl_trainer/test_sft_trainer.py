"""The whole adoption: a driver and a matrix."""

from pytest_distcompat import CompatSuite, Matrix


class TestSFTTrainer(CompatSuite):
    driver = "sft_driver:SFTDriver"
    matrix = Matrix(strategies=("ddp", "fsdp2", "zero2"), precisions=("fp32", "bf16_upcast"))

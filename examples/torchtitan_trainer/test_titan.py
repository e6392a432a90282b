"""The whole adoption: a driver, a matrix, what is known."""

from pytest_distcompat import CompatSuite, Matrix, fails

OPTIONS = ({"activation_checkpointing": True}, {"grad_accum": 2})
MESHES = Matrix(("fsdp2",), ("fp32",), world_sizes=(4,), options=({"tp": 2}, {"dp_replicate": 2}))


class TestTitan(CompatSuite):
    driver = "titan_driver:TitanDriver"
    matrix = Matrix(("fsdp2",), ("fp32", "bf16_upcast"), extra=(MESHES, Matrix(("fsdp2",), ("fp32",), options=OPTIONS)))
    expect = (fails("accumulation", grad_accum=2, reason="pytorch/torchtitan#1710", match="elements of gradients"),)

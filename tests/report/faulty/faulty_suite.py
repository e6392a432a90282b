"""A suite with a passing, a known, a refused, a failing, a crashed, a hung and a skipped cell."""

from pytest_distcompat import CompatSuite, Matrix, fails, refuses


class TestFaulty(CompatSuite):
    driver = "faulty_driver:Faulty"
    matrix = Matrix(
        ("ddp", "fsdp1", "fsdp2", "zero1"), ("fp32", "bf16_upcast"), extra=(Matrix(("fsdp2",), ("fp16_mixed",)),)
    )
    expect = (
        fails("dtypes", strategy="fsdp1", precision="bf16_upcast", reason="https://example.org/issues/1"),
        fails("memory", strategy="ddp", precision="fp32", reason="https://example.org/issues/2"),
        refuses(strategy="fsdp2", precision="fp16_mixed", match="float16 is not supported"),
    )

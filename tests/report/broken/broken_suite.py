"""A suite for each of the broken drivers, in two cells."""

import broken_drivers

from pytest_distcompat import CompatSuite, Matrix

MATRIX = Matrix(("ddp", "fsdp2"), ("fp32",), options=({"model": "mlp"},))


class TestStaleOptimizer(CompatSuite):
    driver = "broken_drivers:StaleOptimizer"
    matrix = MATRIX


for kind in (
    broken_drivers.Hangs,
    broken_drivers.FailsToLoad,
    broken_drivers.SavesPrefixed,
    broken_drivers.SumsRanks,
    broken_drivers.Killed,
    broken_drivers.ForgetsScheduler,
    broken_drivers.AllBfloat16,
):
    name = f"Test{kind.__name__}"
    globals()[name] = type(name, (CompatSuite,), {"driver": f"broken_drivers:{kind.__name__}", "matrix": MATRIX})

"""A suite for each of the broken drivers, in two cells."""

from pytest_distcompat import CompatSuite, Matrix

for name in (
    "StaleOptimizer",
    "Hangs",
    "FailsToLoad",
    "SavesPrefixed",
    "SumsRanks",
    "Killed",
    "ForgetsScheduler",
    "AllBfloat16",
):
    globals()[f"Test{name}"] = type(
        f"Test{name}",
        (CompatSuite,),
        {
            "driver": f"broken_drivers:{name}",
            "matrix": Matrix(("ddp", "fsdp2"), ("fp32",), options=({"model": "mlp"},)),
        },
    )

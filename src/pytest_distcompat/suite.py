"""The built-in suites, where ``pytest --pyargs pytest_distcompat.suite`` collects them."""

from pytest_distcompat.compat_suite import CompatSuite
from pytest_distcompat.ext.upstream import suites

__all__ = ["CompatSuite", "TestAccelerate", "TestDeepSpeed", "TestTorch", "TestTrainer"]

# pytest runs them in this order.
TestTorch = suites.TestTorch
TestAccelerate = suites.TestAccelerate
TestTrainer = suites.TestTrainer
TestDeepSpeed = suites.TestDeepSpeed

"""Marks and base classes of other test harnesses, loaded as a pytest plugin.

``pytest_plugins = ["pytest_distcompat.aliases"]`` loads ``ext.aliases``.
"""

from pytest_distcompat.ext.aliases import DistributedFixture, DistributedTest, gpu_test

__all__ = ["DistributedFixture", "DistributedTest", "gpu_test"]

#: pytest loads this plugin with the module that names it.
pytest_plugins = ["pytest_distcompat.ext.aliases"]

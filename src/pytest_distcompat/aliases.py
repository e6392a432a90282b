"""Marks and base classes of other test harnesses, loaded as a pytest plugin.

``pytest_plugins = ["pytest_distcompat.aliases"]`` in a user's ``conftest.py`` loads this module,
and it loads the extension ``ext.aliases``, which has the code. Tests that were written for
DeepSpeed's ``DistributedTest`` or torchtune's ``gpu_test`` then run on ranks of this plugin
unchanged.
"""

from pytest_distcompat.ext.aliases import DistributedFixture, DistributedTest, gpu_test

__all__ = ["DistributedFixture", "DistributedTest", "gpu_test"]

#: pytest loads this plugin with the module that names it.
pytest_plugins = ["pytest_distcompat.ext.aliases"]

"""The built-in drivers, each named after the library that it drives.

They inherit ``TinyDriver``.
"""

from pytest_distcompat.ext.upstream.drivers.tiny import TinyDriver

__all__ = ["TinyDriver"]

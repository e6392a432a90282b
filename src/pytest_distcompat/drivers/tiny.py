"""``TinyDriver``, the base of drivers of common libraries, under the name users import.

``ext.upstream.drivers`` has it.
"""

from pytest_distcompat.ext.upstream.drivers import TinyDriver

__all__ = ["TinyDriver"]

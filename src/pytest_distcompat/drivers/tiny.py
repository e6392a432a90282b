"""``TinyDriver``, the base of drivers of common libraries: the name of ``ext.upstream.drivers`` that users import."""

from pytest_distcompat.ext.upstream.drivers import TinyDriver

__all__ = ["TinyDriver"]

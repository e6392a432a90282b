"""Sources of settings, which a driver names.

This is the name of ``ext.upstream.sweep`` that users import.
"""

from pytest_distcompat.ext.upstream.sweep.fields import Source

__all__ = ["Source"]

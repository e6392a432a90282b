"""Settings of the installed libraries: which there are, which values to try, and what is known about them."""

from pytest_distcompat.settings.fields import Source

__all__ = ["Source"]

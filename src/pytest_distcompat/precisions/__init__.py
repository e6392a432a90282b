"""Registry of precisions: the dtypes that a model is loaded, computed and optimized in.

A cell, one configuration under test, names a precision second: ``fsdp2-bf16_upcast-w2``. Each
module of this package defines some; other packages add theirs by the entry point group
``pytest_distcompat.precisions``.
"""

from pytest_distcompat.precisions._base import Precision, installed
from pytest_distcompat.registry import Registry

#: The precisions by name: ``fp32``, ``bf16_upcast``.
PRECISIONS: Registry[Precision] = Registry(__name__, Precision, "precision")

__all__ = ["PRECISIONS", "Precision", "installed"]

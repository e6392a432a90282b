"""Registry of strategies: how state is split over the ranks, such as ``ddp``, ``fsdp2``, ``zero3``.

A cell, one configuration under test, names a strategy first: ``fsdp2-fp32-w2``. A ``Strategy`` says
what must hold under it, for the checks. For the drivers, the classes by which trainers are tested,
it has a *backend config* for each library: a function from precision and cell to how that library
spells the strategy (an FSDP plugin of accelerate, DeepSpeed's JSON). Each module of this package
defines some strategies; other packages add theirs by the entry point group
``pytest_distcompat.strategies``.

Such a module uses ``Dtypes`` (the dtype of each kind of tensor under a strategy and a precision),
``WrapSpec`` (which modules of the model are wrapped one by one) and ``MAX_NORM`` (the norm that
gradients are clipped to). ``OPTION_WRAPPERS`` maps an option of a cell to the segment that its
wrapper puts into names of parameters: ``compile`` to ``_orig_mod``.
"""

from pytest_distcompat.registry import Registry
from pytest_distcompat.strategies._base import (
    MAX_NORM,
    OPTION_WRAPPERS,
    Dtypes,
    Strategy,
    WrapSpec,
)

#: The strategies by name.
STRATEGIES: Registry[Strategy] = Registry(__name__, Strategy, "strategy")

__all__ = [
    "MAX_NORM",
    "OPTION_WRAPPERS",
    "STRATEGIES",
    "Dtypes",
    "Strategy",
    "WrapSpec",
]

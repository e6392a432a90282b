"""Arguments by which accelerate runs every strategy on CPU ranks, which it has no option for.

Drivers (the trainers under test) that use accelerate call ``on_cpu`` before they make an
``Accelerator``; so does ``ext/scripts/bridge``, for users' scripts that run on CPU ranks.
"""

from __future__ import annotations

from typing import Any

#: The releases of accelerate with which ``on_cpu`` is expected to work: from the first, up to but
#: without the second.
TESTED_RELEASES = ("1.6", "2")


def check_version(version: str) -> None:
    """Check that the version of accelerate suits ``on_cpu``.

    Raises RuntimeError for one that is too old; warns about a major version that was not tested.
    """
    import warnings

    from packaging.version import Version

    first, after = TESTED_RELEASES
    if Version(version) < Version(first):
        raise RuntimeError(
            f"accelerate {version} cannot run FSDP2 on CPU ranks; {first} or newer is needed"
        )
    if Version(version) >= Version(after):
        problem = (
            f"accelerate {version}: running FSDP and DeepSpeed on CPU was tested below {after} only"
        )
        warnings.warn(f"{problem}; believe the check 'active'", stacklevel=2)


def on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments with which ``Accelerator`` runs the requested strategy on the CPU.

    Without them accelerate silently turns an FSDP plugin with ``cpu=True`` into plain DDP, one
    without it into a bare model without gradient sync, and a DeepSpeed plugin into plain DDP
    (``AcceleratorState.__init__``). For FSDP this function returns none: it sets the state that all
    Accelerators of the process share to a multi-device run on "cpu". Setting ``distributed_type``
    is not documented. Tested with accelerate 1.6 to 1.15. The version is checked (RuntimeError),
    and the check ``active`` fails if it stops working.

    Args:
        settings: The arguments that ``Accelerator`` gets anyway: ``{"fsdp_plugin": plugin}``.
            Without a plugin the strategy is DDP.
    """
    import os
    from datetime import timedelta

    import accelerate
    from accelerate import DistributedType, InitProcessGroupKwargs, PartialState

    check_version(accelerate.__version__)
    if "fsdp_plugin" in settings:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        state = PartialState(cpu=True)
        # A second Accelerator of this process finds what the first has made of it.
        if state.distributed_type != DistributedType.FSDP:
            state.distributed_type = DistributedType.MULTI_GPU
        return {}
    if "deepspeed_plugin" in settings:
        return {
            "kwargs_handlers": [
                InitProcessGroupKwargs(backend="gloo", timeout=timedelta(minutes=10))
            ]
        }
    return {"cpu": True}

"""DeepSpeed 0.19.8: after a load its learning rate schedules give the first rate as the last one, or none.

``load_state_dict`` of each of its five schedules takes ``last_batch_iteration`` alone. ``get_last_lr`` gives what it did
when the schedule was made, until the next step. Expected: the rates that were in use at the save. Seen: the first ones;
of ``OneCycle`` none, it raises ``AssertionError: need to call step() first``.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime import lr_schedules

ARGUMENTS = {
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1},
    "WarmupLR": {"warmup_num_steps": 10},
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 10},
}


def new_schedule(name: str) -> Any:
    """Return a schedule of an optimizer of its own."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    make: Callable[..., Any] = getattr(lr_schedules, name)
    return make(optimizer, **ARGUMENTS[name])


def last_rates(schedule: Any) -> Any:
    """Return the rates of ``get_last_lr``, or its error."""
    try:
        return schedule.get_last_lr()
    except AssertionError as error:
        return error


stale = []
for name in ARGUMENTS:
    saved, loaded = new_schedule(name), new_schedule(name)
    for _ in range(3):
        saved.step()
    loaded.load_state_dict(saved.state_dict())
    if last_rates(saved) != last_rates(loaded):
        stale.append(
            f"{name}: {last_rates(saved)} at the save, {last_rates(loaded)} after the load"
        )

print("SEEN" if stale else "GONE", *stale, sep="\n")

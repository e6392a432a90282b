"""DeepSpeed 0.19.8: after a load its schedule LRRangeTest gives the first learning rate as the last one.

``load_state_dict`` of ``LRRangeTest`` takes ``last_batch_iteration`` alone, and ``get_last_lr`` stays what it was
when the schedule was made, until the next step. Expected: the rate that was saved. Seen: the first one.
"""

import torch
from deepspeed.runtime.lr_schedules import LRRangeTest


def made() -> LRRangeTest:
    """Return a schedule of an optimizer of its own."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return LRRangeTest(optimizer, lr_range_test_min_lr=0.001, lr_range_test_step_size=2)


one, two = made(), made()
for _ in range(3):
    one.step()
two.load_state_dict(one.state_dict())
print(
    "GONE" if one.get_last_lr() == two.get_last_lr() else "SEEN",
    f"last rate {one.get_last_lr()} at the save, {two.get_last_lr()} after the load",
)

"""torchdata 0.11.0: a loader that was saved between two epochs gives no rows in the next one, where it is loaded.

Without workers ``StatefulDataLoader`` takes its state for that of an epoch that is over, and begins a new one; but the sampler,
``StatefulDistributedSampler``, has loaded how many rows it gave, and skips so many. With workers the epoch is whole. Expected: all
rows of the next epoch. Seen: none.
"""

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def make() -> tuple[StatefulDistributedSampler, StatefulDataLoader]:
    sampler = StatefulDistributedSampler(range(8), num_replicas=2, rank=0)
    return sampler, StatefulDataLoader(range(8), batch_size=2, sampler=sampler)


sampler, loader = make()
for _ in loader:
    pass
state = loader.state_dict()
sampler.set_epoch(1)
whole = [batch.tolist() for batch in loader]
sampler, loader = make()
loader.load_state_dict(state)
sampler.set_epoch(1)
resumed = [batch.tolist() for batch in loader]
print("SEEN" if whole and not resumed else "GONE", f"{whole}; resumed {resumed}")

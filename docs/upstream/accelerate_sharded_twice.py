"""accelerate 1.15.0: a loader whose sampler shards already is sharded once more.

Expected: each row once over both ranks, or a warning. Seen: half of the rows are given to no rank, silently.
https://github.com/huggingface/accelerate/issues/4199
"""

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, DistributedSampler

given = []
for rank in range(2):
    sampler = DistributedSampler(range(16), num_replicas=2, rank=rank, shuffle=False)
    loader = DataLoader(range(16), batch_size=2, sampler=sampler)
    given += [
        row
        for batch in prepare_data_loader(loader, num_processes=2, process_index=rank)
        for row in batch.tolist()
    ]
print("SEEN" if len(given) < 16 else "GONE", f"{len(given)} of 16 rows are given: {sorted(given)}")

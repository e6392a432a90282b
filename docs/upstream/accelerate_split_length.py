"""accelerate 1.15.0: with ``split_batches`` and ``even_batches=False`` a rank that is given no part of the last batch counts it.

``BatchSamplerShard.__len__`` returns the number of all batches. Of a last batch of three rows the fourth rank is given none.
Expected: the length of its loader is the number of batches that it gives, 5. Seen: 6, so that steps and learning rates that are
computed from it differ between ranks.
"""

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler

batches = BatchSampler(SequentialSampler(range(23)), batch_size=4, drop_last=False)
shard = BatchSamplerShard(batches, 4, 3, split_batches=True, even_batches=False)
given = len(list(shard))
print("GONE" if len(shard) == given else "SEEN", f"{given} batches, length {len(shard)}")

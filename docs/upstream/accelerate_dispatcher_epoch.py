"""accelerate 1.15.0: the epoch does not reach the sampler of a skipping loader with ``dispatch_batches=True``.

``DataLoaderDispatcher.set_epoch`` looks for ``batch_sampler.sampler``, which is not where ``skip_first_batches`` puts it:
``DataLoaderShard.set_epoch`` looks inside ``SkipBatchSampler`` too. Expected: a loader that skips two batches, and is told the
second epoch, goes on with that epoch's third batch. Seen: it goes on in the order of the first epoch. A Trainer with
``dispatch_batches``, which skips before it sets the epoch, trains on some rows twice after a resume. One process shows it.
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration

accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(dispatch_batches=True, use_seedable_sampler=True),
)
loader = accelerator.prepare(torch.utils.data.DataLoader(range(16), batch_size=2, shuffle=True))
fresh = accelerator.skip_first_batches(loader, 2)
loader.set_epoch(1)
expected = [batch.tolist() for batch in loader][2:]
loader.set_epoch(0)
fresh.set_epoch(1)
found = [batch.tolist() for batch in fresh]
print(
    "GONE" if expected == found else "SEEN",
    f"{found} after skipping 2 batches of epoch 2; expected {expected}",
)

"""accelerate 1.15.0: a run resumed by ``load_state`` and ``skip_first_batches`` draws other dropout masks than one that went on.

``load_state`` restores torch's generator; the iterator of the loader then draws its base seed from it
(``torch.utils.data.dataloader._BaseDataLoaderIter``). Trainer restores the generator once more after the first batch.
Expected: the random number that follows in the run that never stopped. Seen: another.
"""

import tempfile

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=2))
with tempfile.TemporaryDirectory() as directory:
    for number, _ in enumerate(loader):
        if number == 1:
            accelerator.save_state(directory)
        if number == 2:
            expected = torch.rand(1).item()
    accelerator.load_state(directory)
    next(iter(accelerator.skip_first_batches(loader, 2)))
    found = torch.rand(1).item()
print("GONE" if expected == found else "SEEN", f"{found} after the resume; {expected} without it")

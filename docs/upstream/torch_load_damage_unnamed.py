"""torch 2.13.0: ``torch.load`` does not name the file that it cannot read.

Expected: the path of the file in the error, as the error for a missing file has it. Seen: ``PytorchStreamReader failed
reading zip archive``. Whoever resumes from a checkpoint of many files has to find the bad one alone.
"""

import tempfile
from pathlib import Path

import torch

with tempfile.TemporaryDirectory() as place:
    path = Path(place, "optimizer.bin")
    torch.save({"step": torch.ones(64)}, path)
    with path.open("rb+") as file:
        file.truncate(100)
    try:
        torch.load(path)
        print("GONE no error at all")
    except Exception as error:
        print(
            "GONE" if "optimizer.bin" in str(error) else "SEEN", f"{type(error).__name__}: {error}"
        )

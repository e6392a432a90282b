"""torch 2.13.0: ``torch.distributed.checkpoint.load`` does not name the file that it cannot read.

Expected: the path of the ``.distcp`` file in the error. Seen: the error of ``torch.load``, which has none.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

with tempfile.TemporaryDirectory() as place:
    dcp.save({"weight": torch.ones(64)}, checkpoint_id=place, no_dist=True)
    (path,) = Path(place).glob("*.distcp")
    path.write_bytes(path.read_bytes()[:100])
    try:
        dcp.load({"weight": torch.zeros(64)}, checkpoint_id=place, no_dist=True)
        print("GONE no error at all")
    except BaseException as error:  # a CheckpointException is not an Exception
        text = str(error).strip().splitlines()[-1]
        print("GONE" if path.name in str(error) else "SEEN", f"{type(error).__name__}: {text}")

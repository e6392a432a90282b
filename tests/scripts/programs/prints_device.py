"""Writes what a rank knows of the GPU to use, and what waits until CUDA is opened, as JSON; needs no GPU."""

import json
import os
import sys
from pathlib import Path

import torch

NAMES = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE")
variables: dict[str, str | int | None] = {name: os.environ.get(name) for name in NAMES}
variables["divides"] = sum(function.__name__ == "divide_memory" for function, _ in torch.cuda._queued_calls)
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(variables), encoding="utf-8")

"""Prints what a rank knows of the GPU to use, as a line of JSON; needs neither torch nor a GPU."""

import json
import os
import sys
from pathlib import Path

NAMES = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE")
rank = os.environ["RANK"]
Path(sys.argv[1], rank).write_text(json.dumps({name: os.environ.get(name) for name in NAMES}), encoding="utf-8")

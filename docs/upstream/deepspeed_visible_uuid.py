"""DeepSpeed 0.19.8: the free memory of a GPU cannot be read where CUDA_VISIBLE_DEVICES has UUIDs, which CUDA allows.

``CUDA_Accelerator._get_nvml_gpu_id`` takes ``int()`` of each entry; ``available_memory`` calls it, which ZeRO-1 and ZeRO-2 ask.
A MIG instance has no other name than its UUID. Expected: the GPU, which NVML finds by its UUID too. Seen: ``invalid literal for
int() with base 10: 'GPU-...'``. Needs no GPU: nothing of NVML is called before the error.
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"

from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

try:
    found = CUDA_Accelerator._get_nvml_gpu_id(None, 0)
except ValueError as error:
    print("SEEN ValueError:", error)
else:
    print("GONE the GPU is", found)

"""The precisions ``bf16_upcast``, with masters upcast to float32, and ``bf16_pure``.

Masters are the weights that the optimizer updates.

Both load in bfloat16, as https://huggingface.co/blog/deepspeed-to-fsdp-and-back does. There FSDP
without upcasting has masters in bfloat16, and DeepSpeed in float32. If the model were loaded in
float32, both would have masters in float32.
"""

from pytest_distcompat.precisions._base import Precision

BF16_UPCAST = Precision(
    "bf16_upcast",
    load="bfloat16",
    compute="bfloat16",
    master="float32",
    meaning="loaded and computed in bfloat16, master weights and optimizer state in float32",
    # Relative to a reference in float32 5e-4 (loss) and 9e-3 (norm of gradients) were measured;
    # with bfloat16 masters losses are 1.1e-3 to 2e-3 off.
    loss_tolerance=1e-3,
    norm_tolerance=2e-2,
    order=1,
)

BF16_PURE = Precision(
    "bf16_pure",
    load="bfloat16",
    compute="bfloat16",
    master="bfloat16",
    meaning="everything in bfloat16, the optimizer too",
    # 3e-3 and 1.7e-2 were measured.
    loss_tolerance=1e-2,
    norm_tolerance=5e-2,
    order=2,
)

"""torch 2.13.0: ``grouped_mm`` of float32 works on CPU, and is refused without values, on meta and fake tensors.

The product of a mixture of experts, ``torch.nn.functional.grouped_mm``, has shapes that do not depend on where rows go, so that
such a model could be traced, or planned without memory. Expected: the meta kernel takes the dtypes that the CPU kernel takes.
Seen: ``Expected inputs of BF16 type but got mat_a.dtype=torch.float32`` for float32 and float16.
"""

import torch


def refused(dtype: torch.dtype, device: str) -> str:
    rows, experts = (
        torch.ones(8, 16, dtype=dtype, device=device),
        torch.ones(2, 16, 16, dtype=dtype, device=device),
    )
    ends = torch.tensor([4, 8], dtype=torch.int32, device=device)
    try:
        torch.nn.functional.grouped_mm(rows, experts, offs=ends)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


if __name__ == "__main__":
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    found = {str(dtype): refused(dtype, "meta") for dtype in dtypes if not refused(dtype, "cpu")}
    print("SEEN" if any(found.values()) else "GONE", found)

"""accelerate 1.15.0: ``pad_input_tensors`` adds rows of zeros, too many or too few of them, and along dimension 0 alone.

``prepare_pippy`` cuts its batches so. Expected, by its docstring: the last input repeated until the rows divide by the
processes. Seen: zeros; 6 rows for 4 processes become 9, and 8 become 10; with ``dim=1`` it raises. Mends that were proposed:
https://github.com/huggingface/accelerate/pull/4093 and https://github.com/huggingface/accelerate/pull/4150.
"""

import torch
from accelerate.utils import pad_input_tensors

rows = {}
for count in (3, 6, 8):
    rows[count] = len(pad_input_tensors(torch.ones(count, 2), count, 4))
added = pad_input_tensors(torch.ones(3, 2), 3, 4)[-1].tolist()
try:
    columns = list(pad_input_tensors(torch.ones(2, 3), 3, 4, dim=1).shape)
except RuntimeError as error:
    columns = str(error)
wrong = rows != {3: 4, 6: 8, 8: 8} or added != [1.0, 1.0] or columns != [2, 4]
print(
    "SEEN" if wrong else "GONE", f"rows for 4 processes: {rows}; added: {added}; columns: {columns}"
)

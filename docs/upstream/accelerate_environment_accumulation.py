"""accelerate 1.15.0: ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` overrides ``Accelerator(gradient_accumulation_steps=...)``.

The documentation says that the variable counts "if not passed". The variable is what ``accelerate launch`` sets, under DeepSpeed
without being asked. A script that accumulates over 4 micro-batches steps after each, without a word. ``DeepSpeedPlugin`` and the
other variables do as the documentation says. Expected: 4. Seen: 1.
"""

import os

os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"

from accelerate import Accelerator

found = Accelerator(cpu=True, gradient_accumulation_steps=4).gradient_accumulation_steps
print("SEEN" if found != 4 else "GONE", f"gradient_accumulation_steps is {found}; expected 4")

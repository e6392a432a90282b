"""All mutants that checks see, in the order of the packages that they mutate."""

from __future__ import annotations

from . import of_accelerate, of_deepspeed, of_peft, of_torch, of_traincheck, of_transformers
from .mutation import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *of_accelerate.MUTANTS,
    *of_transformers.MUTANTS,
    *of_deepspeed.MUTANTS,
    *of_peft.MUTANTS,
    *of_torch.MUTANTS,
    *of_traincheck.MUTANTS,
)

BY_ID: dict[str, Mutant] = {mutant.id: mutant for mutant in MUTANTS}

"""A trainer's tensors, put together from what each rank holds of them, and their comparison.

Checks use this package on the traces of runs (what ranks recorded, as plain data). Tensors go by
their name in the unwrapped model, before anything wrapped it. No tensor is ever gathered: ranks
record a *digest* of each, a hash of the values that the rank has.

- ``whole`` puts the digests of shards together into those of whole tensors;
- ``differences`` compares them before and after a load;
- ``exported`` says what an export should have;
- ``parameters`` says which parameters are sharded, replicated or never updated;
- ``stages`` divides a model among the stages of a pipeline;
- ``rounding`` says which precision's tolerances apply: a run in float32 that multiplies in TF32 is
  less exact.
"""

from pytest_distcompat.model_values.differences import (
    GroupNumber,
    compare,
    differences,
    other_dtypes,
    same_dtype,
    settings,
    step_counts,
    unlike,
)
from pytest_distcompat.model_values.exported import (
    adapter_name,
    base_weight_of_embedding,
    exported_weights,
    shared_name,
)
from pytest_distcompat.model_values.parameters import (
    expert_parts,
    flat_parameters,
    is_sharded_along,
    tp_copies,
    trainable_names,
    unused,
)
from pytest_distcompat.model_values.rounding import (
    TF32_SINCE_BUILD,
    in_tf32,
    precision_of_products,
    rounding_of,
)
from pytest_distcompat.model_values.stages import (
    across_stages,
    by_stage,
    named_stage,
    pipelines_of,
    stages_by_parameter,
    stages_of,
)
from pytest_distcompat.model_values.whole import (
    FACTORS,
    Digests,
    Kind,
    Names,
    Ranks,
    Values,
    held_states,
    not_elementwise_kinds,
    values,
)

__all__ = [
    "FACTORS",
    "TF32_SINCE_BUILD",
    "Digests",
    "GroupNumber",
    "Kind",
    "Names",
    "Ranks",
    "Values",
    "across_stages",
    "adapter_name",
    "base_weight_of_embedding",
    "by_stage",
    "compare",
    "differences",
    "expert_parts",
    "exported_weights",
    "flat_parameters",
    "held_states",
    "in_tf32",
    "is_sharded_along",
    "named_stage",
    "not_elementwise_kinds",
    "other_dtypes",
    "pipelines_of",
    "precision_of_products",
    "rounding_of",
    "same_dtype",
    "settings",
    "shared_name",
    "stages_by_parameter",
    "stages_of",
    "step_counts",
    "tp_copies",
    "trainable_names",
    "unlike",
    "unused",
    "values",
]

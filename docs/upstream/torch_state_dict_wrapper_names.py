"""torch 2.13.0: ``get_state_dict`` cannot take the state of a model with a child named ``_checkpoint_wrapped_module``.

It takes the name out of every name before it walks through the modules. Expected: the name stays, unless a wrapper of activation
checkpointing has it. Seen: ``AttributeError: 'Sequential' object has no attribute 'weight'``, without any wrapper.
"""

import collections

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

layers = collections.OrderedDict(_checkpoint_wrapped_module=torch.nn.Linear(8, 8))
model = torch.nn.Sequential(torch.nn.Sequential(layers))
try:
    found = str(sorted(get_model_state_dict(model)))
except AttributeError as error:
    found = str(error)

print("SEEN" if "0._checkpoint_wrapped_module.weight" not in found else "GONE", found)

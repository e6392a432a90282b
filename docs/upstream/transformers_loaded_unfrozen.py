"""transformers 5.23.0: ``from_pretrained`` makes parameters trainable that the model's constructor froze.

Mixtures of experts keep the routing's correction biases, and time series models their positions, as parameters with
``requires_grad=False``. ``from_pretrained`` puts new parameters in their place, and every one with floating points is
trainable: ``set_param_for_module`` of ``core_model_loading.py``. Under ZeRO-3, which fills the constructor's own
parameters, they stay frozen. Expected: what is frozen in a new model is frozen in a loaded one. Seen: the biases are
trained, and weight decay moves them.
"""

import tempfile

import transformers
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

config = Ernie4_5_MoeConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    moe_num_experts=4,
    moe_k=2,
)
made = Ernie4_5_MoeForCausalLM(config)
with tempfile.TemporaryDirectory() as directory:
    made.save_pretrained(directory)
    loaded = Ernie4_5_MoeForCausalLM.from_pretrained(directory)

trainable = dict(loaded.named_parameters())
unfrozen = [
    name
    for name, parameter in made.named_parameters()
    if not parameter.requires_grad and trainable[name].requires_grad
]
print("transformers", transformers.__version__)
if unfrozen:
    print(f"SEEN: frozen when made, trainable when loaded: {', '.join(unfrozen)}")
else:
    print("GONE: what is frozen stays frozen")

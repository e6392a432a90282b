"""PEFT 0.21.2: ``save_pretrained`` of trainable tokens raises KeyError on ranks without a state dict.

Under FSDP accelerate's ``get_state_dict`` gives rank 0 the whole state dict and all others an empty
one. All call ``save_pretrained(state_dict=..., is_main_process=...)``, as documented. Expected: the
others write nothing, as with LoRA alone. Seen: KeyError, and the training ends.
"""

import tempfile

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
)


def saved(**more) -> str:
    """Save as a rank other than 0 does, and return what came of it."""
    adapter = LoraConfig(target_modules=["q_proj"], **more)
    model = get_peft_model(LlamaForCausalLM(config), adapter)
    with tempfile.TemporaryDirectory() as directory:
        try:
            model.save_pretrained(directory, state_dict={}, is_main_process=False)
        except KeyError as error:
            return f"KeyError: {error}"
    return "nothing is written"


plain = saved()
tokens = saved(trainable_token_indices=[0, 3])
print(
    "GONE" if tokens == plain else "SEEN", f"LoRA alone: {plain}; with trainable tokens: {tokens}"
)

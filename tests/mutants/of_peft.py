"""Mutants of PEFT: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

ADALORA = "peft/tuners/adalora/layer.py"
LAYERS = "peft/tuners/lora/layer.py"
MODEL = "peft/peft_model.py"
OTHER = "peft/utils/other.py"
TINYLORA = "peft/tuners/tinylora/layer.py"
VARIANTS = "peft/tuners/lora/variants.py"
CONFIG = "peft/config.py"

PULLS = "https://github.com/huggingface/peft/pull/"

MUTANTS = (
    Mutant(
        "peft-2646-head-of-prompts",
        (PULLS + "2646",),
        "prompt learning of a classifier does not train its new last layer, nor save it",
        (
            Edit(
                CONFIG,
                """\
    modules_to_save: Optional[list[str]] = field(
        default=None,
        metadata={
            "help": "List of extra modules to be set as trainable and saved in the final checkpoint. "
            "For example, in Sequence Classification or Token Classification tasks, "
            "the final layer `classifier/score` are randomly initialized and as such need to be trainable and saved. "
            "The module(s) will be fully fine-tuned."
        },
    )
""",
                "",
            ),
        ),
    ),
    Mutant(
        "peft-2839-scaled-embeddings",
        (PULLS + "2839",),
        "DoRA of embeddings that are scaled adds what is not: merged, it computes something else than in training",
        (
            Edit(
                VARIANTS,
                """\
            dora_result = dora_result * embed_scale.to(dora_result.dtype)

        result = mag_norm_scale * result + dora_result
""",
                """\
            pass

        result = mag_norm_scale * result + dora_result
""",
            ),
        ),
    ),
    Mutant(
        "peft-2567-conv-groups",
        (PULLS + "2567",),
        "LoRA of a convolution in groups: its second factor is none in groups, RuntimeError in the first forward",
        (
            Edit(
                LAYERS,
                "            r, self.out_features, out_kernel, out_stride, groups=base_layer.groups, bias=lora_bias\n",
                "            r, self.out_features // base_layer.groups, out_kernel, out_stride, bias=lora_bias\n",
            ),
        ),
    ),
    Mutant(
        "peft-2883-head-dim",
        (PULLS + "2883", "https://github.com/huggingface/peft/issues/2881"),
        "prefix tuning takes the hidden size by heads for the size of a head: RuntimeError in the first forward",
        (
            Edit(
                OTHER,
                '        elif model_config.get("head_dim", None) is not None:\n',
                "        elif False:\n",
            ),
        ),
    ),
    Mutant(
        "peft-3109-layers-of-config",
        (PULLS + "3109",),
        "prompt learning looks for the number of layers in the dict of a config, which has it under another name",
        (Edit(OTHER, '        if hasattr(orig_model_config, "num_hidden_layers"):\n', "        if False:\n"),),
    ),
    Mutant(
        "peft-3199-keywords-alone",
        (PULLS + "3199",),
        "a layer of modules_to_save that is called with keywords alone: TypeError in the first forward",
        (
            Edit(
                OTHER,
                "    def forward(self, *args, **kwargs):\n        self._check_forward_args(*args, **kwargs)\n",
                "    def forward(self, x, *args, **kwargs):\n        args = (x, *args)\n"
                "        self._check_forward_args(*args, **kwargs)\n",
            ),
        ),
    ),
    Mutant(
        "peft-3396-merged-adapter",
        (PULLS + "3396",),
        "merging an adapter of embeddings in bfloat16 replaces its parameters: the optimizer updates those of before",
        (
            Edit(
                LAYERS,
                """\
        output_tensor = transpose(weight_B @ weight_A, True) * self.scaling[adapter]

        if cast_to_fp32:
            output_tensor = output_tensor.to(dtype=dtype)
""",
                """\
        output_tensor = transpose(weight_B @ weight_A, True) * self.scaling[adapter]

        if cast_to_fp32:
            output_tensor = output_tensor.to(dtype=dtype)
            self.lora_embedding_A[adapter] = weight_A.to(dtype)
            self.lora_embedding_B[adapter] = weight_B.to(dtype)
""",
            ),
        ),
    ),
    Mutant(
        "peft-1884-first-factors",
        (PULLS + "1884",),
        "a new AdaLoRA adapter changes what the model computes: its singular values are random and not zero",
        (
            Edit(
                ADALORA,
                "nn.init.zeros_(self.lora_E[adapter_name])",
                "nn.init.normal_(self.lora_E[adapter_name], mean=0.0, std=0.02)",
            ),
        ),
    ),
    Mutant(
        "peft-2635-method-as-text",
        (PULLS + "2635",),
        "the model card of a method whose type is a text: AttributeError when the adapter is saved",
        (
            Edit(
                MODEL,
                "        if not isinstance(peft_method, str):\n            peft_method = peft_method.value\n",
                "        peft_method = peft_method.value\n",
            ),
        ),
    ),
    Mutant(
        "peft-2702-base-of-poly",
        (PULLS + "2702",),
        "get_base_model of Poly returns Poly's own model, whose forward has other arguments than the base model's",
        (
            Edit(
                MODEL,
                "        return self.base_model if self.active_peft_config.is_prompt_learning else self.base_model.model\n",
                """\
        own = self.active_peft_config.is_prompt_learning or self.peft_type == PeftType.POLY
        return self.base_model if own else self.base_model.model
""",
            ),
        ),
    ),
    Mutant(
        "peft-3180-projections-by-hash",
        (PULLS + "3180",),
        "TinyLoRA draws its projections by the hash of the adapter's name, which differs from process to process",
        (
            Edit(
                TINYLORA,
                "        return base_seed + self._layer_idx\n",
                "        return base_seed + hash(adapter_name) % 10000\n",
            ),
        ),
    ),
    Mutant(
        "peft-3559-adapter-added-twice",
        (PULLS + "3559",),
        "an adapter is added under a name that exists: it replaces the factors, and no error says so",
        (
            Edit(
                MODEL,
                """\
        if adapter_name in self.peft_config:
            raise ValueError(f"Adapter with name '{adapter_name}' already exists.")

        prefix =""",
                "        prefix =",
            ),
        ),
    ),
)

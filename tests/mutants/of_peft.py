"""Mutants of PEFT: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

LAYERS = "peft/tuners/lora/layer.py"
OTHER = "peft/utils/other.py"

PULLS = "https://github.com/huggingface/peft/pull/"

MUTANTS = (
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
)

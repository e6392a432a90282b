"""Errors of the TrainCheck artefact in libraries; ``test_traincheck`` has all 26 of it.

https://github.com/OrderLab/TrainCheck and https://arxiv.org/abs/2506.14813.
"""

from __future__ import annotations

from .mutation import Edit, Mutant

BF16_OPTIMIZER = "deepspeed/runtime/bf16_optimizer.py"
GPT2 = "transformers/models/gpt2/modeling_gpt2.py"
TORCH_COLLECTIVES = "torch/distributed/distributed_c10d.py"

DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/"
TORCH = "https://github.com/pytorch/pytorch/"
TRANSFORMERS = "https://github.com/huggingface/transformers/"

MUTANTS = (
    Mutant(
        "tr-29903-state-dict",
        (TRANSFORMERS + "issues/29903",),
        "the state dict that save_pretrained makes is corrupt: tied weights lose all their names",
        (
            Edit(
                "transformers/modeling_utils.py",
                "        known = inames.intersection(to_delete_names)\n",
                "        known = inames\n",
            ),
        ),
    ),
    Mutant(
        "tr-33455-epoch-steps",
        (TRANSFORMERS + "issues/33455",),
        "an epoch's incomplete last accumulation window is dropped, training ends early",
        (
            Edit(
                "transformers/trainer.py",
                "                + int(len_dataloader % args.gradient_accumulation_steps > 0),\n",
                "                + 0,\n",
            ),
        ),
    ),
    Mutant(
        "ds-1801-tp-clip",
        (DEEPSPEED + "pull/1801",),
        "tensor-parallel ranks but the first do not clip what all have: layer norms drift apart",
        (
            Edit(
                BF16_OPTIMIZER,
                "                    all_grads_for_clip.append(self.fp32_groups_gradients[i][j])\n",
                "                    if tensor_mp_rank == 0 or is_model_parallel_parameter(lp) or is_moe_param(lp):\n"
                "                        all_grads_for_clip.append(self.fp32_groups_gradients[i][j])\n",
            ),
        ),
    ),
    Mutant(
        "ds-5794-moe-capacity",
        (DEEPSPEED + "issues/5794",),
        "each rank makes room for its own tokens at an expert: shapes differ in an exchange",
        (
            Edit(
                "deepspeed/moe/sharded_moe.py",
                "            dist.all_reduce(new_capacity, op=dist.ReduceOp.MAX, group=ep_group)\n",
                "            pass\n",
                count=3,
            ),
        ),
    ),
    Mutant(
        "ds-6772-module-id",
        (DEEPSPEED + "issues/6772", DEEPSPEED + "pull/6847"),
        "ZeRO-3 overwrites the attribute `id` of the user's modules",
        (
            Edit(
                "deepspeed/runtime/zero/parameter_offload.py",
                "        module.ds_id = my_count\n",
                "        module.ds_id = module.id = my_count\n",
            ),
        ),
    ),
    Mutant(
        "pt-84803-lost-data",
        (TORCH + "issues/84803", TORCH + "issues/96600", "https://github.com/baichuan-inc/Baichuan2/issues/86"),
        "data between devices arrives as zeros now and then",
        (
            Edit(TORCH_COLLECTIVES, "\n_MPI_AVAILABLE = True\n", "\n_MPI_AVAILABLE = True\n_gathered = 0\n"),
            Edit(
                TORCH_COLLECTIVES,
                '        _warn_not_in_group("all_gather_single")\n        return\n',
                """\
        _warn_not_in_group("all_gather_single")
        return

    global _gathered
    _gathered += 1
    if get_rank() == 1 and _gathered % 11 == 0:
        input_tensor = torch.zeros_like(input_tensor)
""",
            ),
        ),
    ),
    Mutant(
        "pt-115607-compiled-step",
        (TORCH + "issues/115607",),
        "a compiled optimizer step is used whether gradients are None or not",
        (
            Edit(
                "torch/_dynamo/variables/optimizer.py",
                """\
                else:
                    install_guard(grad_source.make_guard(GuardBuilder.CONSTANT_MATCH))
""",
                "",
            ),
        ),
    ),
)

#: No profile and no check sees these.
UNSEEN = (
    Mutant(
        "tr-17877-init-again",
        (TRANSFORMERS + "pull/17877",),
        "each module of GPT-2 initialises the projections of all that it contains: several times the work",
        (
            Edit(
                GPT2,
                "        if isinstance(module, (GPT2Attention, GPT2MLP)):\n",
                """\
        for name, parameter in module.named_parameters():
            if not name.endswith("c_proj.weight"):
                continue
""",
            ),
            Edit(
                GPT2,
                "            init.normal_(module.c_proj.weight, mean=0.0, std=std)\n",
                "            init.normal_(parameter, mean=0.0, std=std)\n",
            ),
        ),
    ),
    Mutant(
        "tr-33844-eval-dropout",
        (TRANSFORMERS + "pull/33844",),
        "the attention of Bart and of what was copied from it drops out in evaluation too",
        (
            Edit(
                "transformers/models/bart/modeling_bart.py",
                "dropout=0.0 if not self.training else self.dropout,",
                "dropout=self.dropout,",
            ),
        ),
    ),
    Mutant(
        "pt-56488-worker-seed",
        (TORCH + "pull/56488",),
        "the workers of a DataLoader have one random state of NumPy: they augment their rows alike",
        (Edit("torch/utils/data/_utils/worker.py", "            np.random.seed(np_seed)\n", "            pass\n"),),
    ),
)

#: The link and the verdict of each of the 26 errors: caught, missed or not expressible.
VERDICTS: dict[str, tuple[str, str]] = {
    "PT-84803": (
        "https://github.com/pytorch/pytorch/issues/84803",
        "**caught** by `pt-84803-lost-data`, which loses data of a collective, not of a copy between GPUs",
    ),
    "PT-96600": ("https://github.com/pytorch/pytorch/issues/96600", "**caught** by `pt-84803-lost-data`"),
    "Baichuan2-86": ("https://github.com/baichuan-inc/Baichuan2/issues/86", "**caught** by `pt-84803-lost-data`"),
    "DS-1801": ("https://github.com/deepspeedai/DeepSpeed/pull/1801", "**caught** by `ds-1801-tp-clip`; own driver"),
    "DS-5794": (
        "https://github.com/deepspeedai/DeepSpeed/issues/5794",
        "**caught** by `ds-5794-moe-capacity`; own driver",
    ),
    "LT-725": (
        "https://github.com/Lightning-AI/lightning-thunder/issues/725",
        "**not expressible**: lightning-thunder's own compiler",
    ),
    "MM-702": (
        "https://github.com/open-mmlab/mmpretrain/issues/702",
        "**caught** by torch `fsdp2-fp32-w2-frozen:optimizer`",
    ),
    "PT-51800": ("https://github.com/pytorch/pytorch/issues/51800", "**not expressible**: no training is wrong"),
    "PT-104336": ("https://github.com/pytorch/pytorch/issues/104336", "**caught** by torch `ddp-fp32-w2:active`"),
    "PT-115607": (
        "https://github.com/pytorch/pytorch/issues/115607",
        "**caught** by `pt-115607-compiled-step`; own driver",
    ),
    "FORUM-84911": ("https://discuss.pytorch.org/t/84911", "**caught** by torch `ddp-fp32-w2:optimizer`"),
    "SO-60335387": ("https://stackoverflow.com/questions/60335387", "**caught** by torch `ddp-fp32-w2:parity`"),
    "SO-67180955": (
        "https://stackoverflow.com/questions/67180955",
        "**missed**: NumPy's random state in DataLoader workers; no data set draws",
    ),
    "TF-17877": (
        "https://github.com/huggingface/transformers/pull/17877",
        "**missed**: repeated initialisation; only the time is wrong",
    ),
    "TF-23723": (
        "https://github.com/huggingface/transformers/issues/23723",
        "**not expressible**: generation, not training",
    ),
    "TF-29903": (
        "https://github.com/huggingface/transformers/issues/29903",
        "**caught** by `tr-29903-state-dict`, made from the paper's description",
    ),
    "TF-33455": ("https://github.com/huggingface/transformers/issues/33455", "**caught** by `tr-33455-epoch-steps`"),
    "TF-33844": (
        "https://github.com/huggingface/transformers/pull/33844",
        "**missed**: dropout of Bart in evaluation; the profile `zoo` sets dropout to 0",
    ),
    "TF-34204": (
        "https://github.com/huggingface/transformers/issues/34204",
        "**not expressible**: a processor, not training",
    ),
    "X-jxmnop": ("https://x.com/jxmnop/status/1778520637193240892", "**caught** by torch `ddp-fp32-w2:active`"),
    "AC-2665": (
        "https://github.com/huggingface/accelerate/issues/2665",
        "**caught**, still there: accelerate `fsdp1-fp32-w2-no_use_orig_params:optimizer`",
    ),
    "DS-6770": (
        "https://github.com/deepspeedai/DeepSpeed/issues/6770",
        "**caught**, still there: deepspeed `zero2-fp32-w2:active`",
    ),
    "DS-5489": (
        "https://github.com/deepspeedai/DeepSpeed/issues/5489",
        "**caught**, still there: deepspeed `zero1-fp32-w2-frozen:export` (profile `full`)",
    ),
    "DS-6714": (
        "https://github.com/deepspeedai/DeepSpeed/issues/6714",
        "**missed**: no driver has DeepSpeed's pipeline",
    ),
    "DS-6772": (
        "https://github.com/deepspeedai/DeepSpeed/issues/6772",
        "**caught** by `ds-6772-module-id`; own driver",
    ),
    "DS-6089": (
        "https://github.com/deepspeedai/DeepSpeed/issues/6809",
        "**caught**, still there: deepspeed `zero0-fp32-w2:optimizer`; own driver",
    ),
}

"""Checks of the sweep, and those of its cells that every session of a built-in suite has.

The sweep (profile ``sweep``) tries every setting of the installed libraries, thousands of cells.
The built-in suites (``suites.py``) add the few cells of ``SLICE`` to their matrices, so that a
usual session tests some settings too. A cell is one configuration under test; its part ``set_...``
has the settings, joined by ``+``.
"""

from __future__ import annotations

#: What the profile ``sweep`` runs of each setting: what one training shows. Rules add checks with
#: runs of their own.
SWEEP_CHECKS = (
    "active",
    "names",
    "units",
    "optimizer",
    "dtypes",
    "parity",
    "clipping",
    "gradients",
    "accumulation",
)
#: Cells of the sweep that the built-in suites have in every session, by driver.
SLICE = {
    "torch": (
        # What a user has who leaves the argument out; the driver's cells say true.
        "fsdp2-fp32-w2-model_mlp-set_fully_shard.reshard_after_forward=null",
        # Between forward and backward two ranks together hold all parameters.
        "fsdp2-fp32-w4-model_mlp-set_fully_shard.reshard_after_forward=2",
    ),
    "accelerate": (
        "ddp-fp32-w2-model_mlp-set_env.ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2",
        # torch then uses up to 7 physical cores; accelerate alone would share them among ranks.
        "ddp-fp32-w2-model_mlp-set_env.OMP_NUM_THREADS=7",
        "fsdp2-fp32-w2-model_mlp-set_FullyShardedDataParallelPlugin.fsdp_version=7",
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.use_multi_rank_bucket_allreduce=false",
        # What the JSON of most users leaves to accelerate: the loader's batch size, and sizes of
        # buckets by the hidden size of a language model.
        (
            "zero3-fp32-w2-set_ds_config.train_micro_batch_size_per_gpu=auto"
            "+ds_config.zero_optimization.reduce_bucket_size=auto"
            "+ds_config.zero_optimization.stage3_param_persistence_threshold=auto"
            "+ds_config.zero_optimization.stage3_prefetch_bucket_size=auto"
        ),
        # A layer beside the adapter that is called with keywords alone.
        (
            "ddp-fp32-w2-lora-set_LoraConfig.modules_to_save=(self_attn)"
            "+LoraConfig.target_modules=(up_proj,down_proj)"
        ),
        # An adapter with magnitudes, also of embeddings that are scaled.
        (
            "ddp-fp32-w2-model_hf:Gemma3TextForSequenceClassification-lora"
            "-set_LoraConfig.target_modules=(embed_tokens,q_proj)+LoraConfig.use_dora=true"
        ),
        # Other methods than LoRA: one with three factors, and one with random projections and with
        # vectors that layers share.
        "ddp-fp32-w2-lora-set_PeftConfig.peft_type=ADALORA+PeftConfig.total_step=20",
        "zero2-fp32-w2-lora-set_PeftConfig.peft_type=TINYLORA",
        # A vocabulary that has grown, whose adapted output layer is tied to the embeddings.
        (
            "ddp-fp32-w2-model_llama_tied-loaded_from_pretrained-lora"
            "-set_LoraConfig.target_modules=(lm_head,q_proj)+resize_token_embeddings.new_num_tokens=131"
        ),
    ),
    "trainer": (
        (
            "zero2-fp32-w2-model_mlp-set_ds_config.optimizer.type=AdamW+ds_config.optimizer.params.torch_adam=true"
            "+ds_config.optimizer.params.lr=auto+ds_config.optimizer.params.weight_decay=auto"
        ),
        "zero2-fp32-w2-model_mlp-set_TrainingArguments.skip_memory_metrics=false",
        "zero2-fp32-w2-set_TrainingArguments.neftune_noise_alpha=1.0",
        # All ranks are to find the best checkpoint, which one of them writes.
        "ddp-fp32-w2-model_mlp-set_TrainingArguments.load_best_model_at_end=true",
        "fsdp2-fp32-w2-model_mlp-set_TrainingArguments.enable_jit_checkpoint=true",
    ),
    "deepspeed": (
        # The loss scale grows within the steps of a run, as it does each 1000 steps by default.
        "zero2-fp16_mixed-w2-model_mlp-set_ds_config.fp16.loss_scale_window=2",
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.round_robin_gradients=true",
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.elastic_checkpoint=true",
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.pipeline_loading_checkpoint=true",
        "zero2-fp32-w2-model_mlp-set_ds_config.checkpoint.checkpoint_serialization=false",
        "zero3-fp32-w2-model_mlp-set_ds_config.zero_optimization.stage3_module_granularity_threshold=1000003",
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.offload_optimizer.device=cpu",
        (
            "zero1-fp32-w2-model_mlp-set_ds_config.flops_profiler.enabled=true"
            "+ds_config.torch_autocast.dtype=float16+ds_config.torch_autocast.enabled=true"
        ),
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.reduce_scatter=false",
        (
            "zero3-fp32-w2-model_mlp-set_ds_config.scheduler.params.lr_range_test_min_lr=0.001"
            "+ds_config.scheduler.type=LRRangeTest"
        ),
        # A schedule with the shortest warm-up, of several groups.
        (
            "zero2-fp32-w2-model_mlp-param_groups-set_ds_config.scheduler.type=WarmupCosineLR"
            "+ds_config.scheduler.params.warmup_num_steps=1+ds_config.scheduler.params.total_num_steps=20"
        ),
        # Memory that nobody wrote is NaN.
        (
            "zero3-fp32-w2-model_mlp-set_ds_config.zero_optimization.stage3_use_all_reduce_for_fetch_params=true"
            "+ds_config.zero_optimization.reduce_bucket_size=1000003+use_deterministic_algorithms.mode=true"
        ),
        # Groups with learning rates of their own, to which a schedule warms up.
        (
            "zero2-fp32-w2-model_mlp-param_groups-set_ds_config.optimizer.type=SGD+ds_config.optimizer.params.lr=0.003"
            "+ds_config.optimizer.params.momentum=0.9+ds_config.scheduler.type=WarmupLR"
            "+ds_config.scheduler.params.warmup_max_lr=null+ds_config.scheduler.params.warmup_num_steps=2"
        ),
        "zero3-bf16_upcast-w2-model_mlp-set_ds_config.data_types.keep_in_fp32_modules=(norm)",
        (
            "zero3-fp32-w2-model_mlp-set_ds_config.managed_gradient_accumulation=false"
            "+ds_config.zero_optimization.leaf_module.name_suffixes=(blocks.0)"
        ),
    ),
}

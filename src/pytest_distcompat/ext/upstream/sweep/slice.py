"""What the sweep runs of each setting, and the part of it that each session of a built-in suite runs."""

from __future__ import annotations

#: What the profile ``sweep`` runs of each setting: what one training shows. Rules add checks with runs of their own.
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
#: Cells of the sweep that the built-in suites have in every session, by driver: chosen as docs/sweep.md says.
SLICE = {
    "accelerate": (
        "ddp-fp32-w2-model_mlp-set_env.ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2",
        "fsdp2-fp32-w2-model_mlp-set_FullyShardedDataParallelPlugin.fsdp_version=7",
    ),
    "trainer": (
        (
            "zero2-fp32-w2-model_mlp-set_ds_config.optimizer.type=AdamW+ds_config.optimizer.params.torch_adam=true"
            "+ds_config.optimizer.params.lr=auto+ds_config.optimizer.params.weight_decay=auto"
        ),
    ),
    "deepspeed": (
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.round_robin_gradients=true",
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.elastic_checkpoint=true",
        "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.pipeline_loading_checkpoint=true",
        "zero2-fp32-w2-model_mlp-set_ds_config.checkpoint.checkpoint_serialization=false",
        "zero3-fp32-w2-model_mlp-set_ds_config.zero_optimization.stage3_module_granularity_threshold=1000003",
    ),
}

"""Where the built-in suite sees each mutant: driver, cell, check, and what the check says there."""

from __future__ import annotations

from mutants.mutation import Sighting

_LOAD_EMPTY = "the optimizer's state is empty after the load"
_MASTERS = "bfloat16 masters; expected float32"
_SCHEDULED = (
    "zero2-fp32-w2-model_mlp-param_groups-set_ds_config.scheduler.type=WarmupCosineLR"
    "+ds_config.scheduler.params.warmup_num_steps=1+ds_config.scheduler.params.total_num_steps=20"
)
_WARMED_UP = (
    "zero2-fp32-w2-model_mlp-param_groups-set_ds_config.optimizer.type=SGD+ds_config.optimizer.params.lr=0.003"
    "+ds_config.optimizer.params.momentum=0.9+ds_config.scheduler.type=WarmupLR"
    "+ds_config.scheduler.params.warmup_max_lr=null+ds_config.scheduler.params.warmup_num_steps=2"
)

_CALLED_WITH_KEYWORDS = (
    "ddp-fp32-w2-lora-set_LoraConfig.modules_to_save=(self_attn)+LoraConfig.target_modules=(up_proj,down_proj)"
)

_WITH_MAGNITUDES = (
    "ddp-fp32-w2-model_hf:Gemma3TextForSequenceClassification-lora"
    "-set_LoraConfig.target_modules=(embed_tokens,q_proj)+LoraConfig.use_dora=true"
)
_GROWN = (
    "ddp-fp32-w2-model_llama_tied-loaded_from_pretrained-lora"
    "-set_LoraConfig.target_modules=(lm_head,q_proj)+resize_token_embeddings.new_num_tokens=131"
)

SIGHTINGS: dict[str, tuple[Sighting, ...]] = {
    "acc-1755-fsdp1-optim-args": (Sighting("accelerate", "fsdp1-fp32-w2", "resume", "unhashable type: 'dict'"),),
    "acc-2674-fsdp1-upcast": (Sighting("accelerate", "fsdp1-bf16_upcast-w2", "dtypes", _MASTERS),),
    "acc-2728-sampler-of-batches": (
        Sighting("accelerate", "ddp-fp32-w2", "coverage", "'NoneType' object is not iterable"),
    ),
    "acc-2755-threads": (
        Sighting("accelerate", "ddp-fp32-w2-model_mlp-set_env.OMP_NUM_THREADS=7", "active", "'threads' is"),
    ),
    "acc-3025-dispatched-whole-batches": (
        Sighting("accelerate", "ddp-fp32-w2", "coverage", "'NoneType' object has no attribute 'sampler'"),
    ),
    "acc-3114-negative-dim": (
        Sighting("accelerate", "ddp-fp32-w2", "exchanges", r"dim=-1, pad_index=-100\) of float32: rank 0: gets "),
    ),
    "acc-3146-zero3-save-model": (Sighting("accelerate", "zero3-fp32-w2", "export", "has no attribute 'items'"),),
    "acc-3361-fp8-ds": (Sighting("accelerate", "zero2-fp8-w2-fp8_backend_te", "float8", "8 bits"),),
    "acc-3443-json-without-tp": (Sighting("accelerate", "zero2-fp32-w2", "active", "KeyError: 'tensor_parallel'"),),
    "acc-3459-unseeded-generator": (
        Sighting("accelerate", "ddp-fp32-w2", "coverage", "set_seed: its order is that of shuffle"),
    ),
    "acc-3465-clip-norm": (Sighting("accelerate", "fsdp2-fp32-w2", "clipping", "has no attribute 'fsdp_version'"),),
    "acc-3528-no-dtype-attr": (
        Sighting(
            "accelerate", "fsdp2-bf16_upcast-w2-model_mlp", "active", "has no attribute '(dtype|_no_split_modules)'"
        ),
    ),
    "acc-3528-size-wrap": (
        Sighting("accelerate", "fsdp2-fp32-w2-wrap_policy_size", "units", "has no attribute 'numel'"),
    ),
    "acc-3554-compile-names": (
        Sighting("accelerate", "fsdp2-fp32-w2-model_mlp-compile_aot_eager", "names", "KeyError|FSDP2 mapping failed"),
    ),
    "acc-3556-set-epoch": (
        Sighting("accelerate", "ddp-fp32-w2", "coverage", "sampler: epoch 2 has the order of epoch 1"),
    ),
    "acc-3630-ds-boundary": (Sighting("accelerate", "zero2-fp32-w2-grad_accum_2", "parity", r"step \d+: "),),
    "acc-3638-ds-gas-auto": (Sighting("accelerate", "zero1-fp32-w2", "active", "TypeError"),),
    "acc-3656-ds-no-sync": (
        Sighting("accelerate", "zero2-fp32-w2-grad_accum_2", "active", "no_sync context manager is incompatible"),
    ),
    "acc-3659-empty-loader": (
        Sighting("mutants.drivers:FewRows", "ddp-fp32-w2", "coverage", "'NoneType' object has no attribute 'tolist'"),
    ),
    "acc-3687-mesh-without-tp": (
        Sighting("mutants.drivers:MeshOfShards", "zero2-fp32-w2", "active", "submesh_tp_size"),
    ),
    "acc-3731-ignored-modules": (
        Sighting("accelerate", "fsdp2-fp32-w2-model_mlp-ignored_modules", "units", "left out of the sharding"),
    ),
    "acc-3762-fsdp2-no-sync": (
        Sighting("accelerate", "fsdp2-fp32-w2-grad_accum_2", "accumulation", "elements of gradients were reduced"),
    ),
    "acc-3787-mapping-keywords": (
        Sighting("accelerate", "ddp-fp32-w2", "exchanges", "gather of dict in a list: .*keywords must be strings"),
    ),
    "acc-3881-partial-compile": (
        Sighting("mutants.drivers:PartlyCompiled", "ddp-fp32-w2", "parity", "KeyError: '_orig_mod'"),
    ),
    "acc-3904-dcp-optim": (Sighting("accelerate", "fsdp2-fp32-w2", "resume", _LOAD_EMPTY),),
    "acc-3905-upcast-noop": (Sighting("accelerate", "fsdp2-bf16_upcast-w2", "dtypes", _MASTERS),),
    "acc-3908-tp-only": (Sighting("trainer", "fsdp2-fp32-w2-tp_2-save_only_model", "active", r"KeyError: \d+"),),
    "acc-3971-planner": (Sighting("accelerate", "fsdp2-fp32-w2", "resume", "Missing key in checkpoint state_dict"),),
    "acc-3982-zip-load": (
        Sighting(
            "mutants.drivers:Quantized",
            "fsdp2-fp32-w2-cpu_ram_efficient_loading",
            "active",
            "`weight` is not an nn.Module",
        ),
    ),
    "acc-4021-dtype-of-shards": (
        Sighting(
            "accelerate",
            "fsdp2-bf16_upcast-w2-cpu_ram_efficient_loading",
            "start",
            "other values after build than were loaded",
        ),
    ),
    "acc-4052-split-rows": (
        Sighting("accelerate", "ddp-fp32-w2", "exchanges", "split_between_processes of list of one: rank 1: gets "),
    ),
    "acc-4071-skipped-epoch": (
        Sighting("accelerate", "ddp-fp32-w2", "coverage", "seedable: resumed in the middle of epoch 2"),
    ),
    "acc-4119-path-marker": (Sighting("accelerate", "fsdp2-fp32-w2", "paths", "CheckpointException|No such file"),),
    "acc-4172-ac-children": (
        Sighting("accelerate", "fsdp2-fp32-w2-activation_checkpointing", "units", "the activations are recomputed of"),
    ),
    "acc-999-sched-gas": (Sighting("accelerate", "ddp-fp32-w2-grad_accum_2", "parity", "the learning rate is"),),
    "ds-1801-tp-clip": (
        Sighting(
            "mutants.drivers:TensorParallel",
            "zero1-bf16_upcast-w2-grad_accum_dtype_fp32",
            "active",
            "parameters differ from rank 0's",
        ),
    ),
    "ds-4688-short-warmup": (Sighting("deepspeed", _SCHEDULED, "parity", "ZeroDivisionError"),),
    "ds-5150-clip": (
        Sighting("deepspeed", "zero0-fp32-w2", "clipping", "the gradients that the optimizer gets have norm"),
    ),
    "ds-5170-bf16-allreduce": (
        Sighting(
            "deepspeed",
            "zero1-bf16_upcast-w2-grad_accum_dtype_fp32",
            "clipping",
            "the gradients that the optimizer gets",
        ),
    ),
    "ds-5730-spelling": (Sighting("deepspeed", "zero2-fp32-w2", "reshard", "SystemExit: 2"),),
    "ds-5794-moe-capacity": (
        Sighting("mutants.drivers:Experts", "zero0-fp32-w2", "optimizer", "SIGABRT during 'step'|in a collective"),
    ),
    "ds-6772-module-id": (
        Sighting("mutants.drivers:Numbered", "zero3-bf16_upcast-w2-model_mlp", "parity", "step 1: the loss is"),
    ),
    "ds-7473-ulysses-loss": (
        Sighting("deepspeed", "zero2-fp32-w4-cp_2", "parity", r"step 1: .*the loss is .* in the reference"),
    ),
    "ds-8491-ulysses-gradients": (
        Sighting("deepspeed", "zero2-fp32-w4-cp_2", "parity", r"step 1: .*the gradient norm is .* in the reference"),
    ),
    "ds-7566-init-of-parents": (Sighting("mutants.drivers:SecondModel", "zero3-fp32-w2", "active", "AttributeError"),),
    "ds-7580-overflow-z1": (
        Sighting(
            "twins.twins_float8:Half", "zero1-fp16_mixed-w2", "scaling", "SIGABRT during 'overflow'|changed in a step"
        ),
    ),
    "ds-7586-z0-load-path": (Sighting("deepspeed", "zero0-bf16_upcast-w2", "resume", "AttributeError"),),
    "ds-7601-local-rank": (
        Sighting("mutants.drivers:NodesOfOneRank", "zero3-fp32-w2", "reshard", "other values after the load"),
    ),
    "ds-7659-scalar-state": (
        Sighting(
            "deepspeed",
            "zero2-fp32-w2-model_mlp-set_ds_config.zero_optimization.elastic_checkpoint=true",
            "resume",
            r"slice\(\) cannot be applied to a 0-dim tensor",
        ),
    ),
    "ds-7763-destroyed-engine": (
        Sighting("deepspeed", "zero0-fp32-w2", "evaluation", "IndexError: list index out of range"),
    ),
    "ds-7786-z0-bf16-ckpt": (Sighting("deepspeed", "zero0-bf16_upcast-w2", "resume", "optimizer"),),
    "ds-7790-sums-without-zero": (Sighting("deepspeed", "zero0-bf16_upcast-w2-grad_accum_dtype_fp32", "active", "."),),
    "ds-7829-tiled-gradients": (
        Sighting("deepspeed", "zero2-fp32-w2-model_tiled", "parity", "step 1: .*the gradient norm is"),
    ),
    "ds-7839-z0-zero-grad": (
        Sighting("deepspeed", "zero0-bf16_upcast-w2", "parity", "step [23]: .*the gradient norm"),
    ),
    "ds-7969-first-rates": (Sighting("deepspeed", _SCHEDULED, "parity", r"step 1: all ranks: lr of blocks"),),
    "ds-7990-config-of-text": (
        Sighting(
            "mutants.drivers:WithImages", "zero2-fp32-w4-cp_2", "active", "has no attribute 'num_attention_heads'"
        ),
    ),
    "ds-8009-attached-module": (
        Sighting("mutants.drivers:Attached", "zero3-fp32-w2", "active", "no attribute '_in_forward'"),
    ),
    "ds-8029-frozen-masters": (Sighting("deepspeed", "zero0-bf16_upcast-w2-frozen", "memory", "elements are trained"),),
    "ds-8113-two-dtypes": (
        Sighting("mutants.drivers:MixedAutocast", "zero3-bf16_upcast-w2", "active", "must have the same dtype"),
    ),
    "ds-8144-delegated-hooks": (
        Sighting("deepspeed", "zero3-fp32-w2-model_twice", "active", "The size of tensor a .* must match"),
    ),
    "ds-8158-fetch-stride": (
        Sighting(
            "deepspeed",
            "zero3-fp32-w2-model_mlp-set_ds_config.zero_optimization.stage3_use_all_reduce_for_fetch_params=true"
            "+ds_config.zero_optimization.reduce_bucket_size=1000003+use_deterministic_algorithms.mode=true",
            "parity",
            "the loss of this step is nan",
        ),
    ),
    "ds-8171-rates-of-groups": (
        Sighting("deepspeed", _WARMED_UP, "parity", r"the learning rate is 0\.0015; 0\.0015, 0\.003 in the reference"),
    ),
    "peft-1884-first-factors": (
        Sighting(
            "accelerate",
            "ddp-fp32-w2-lora-set_PeftConfig.peft_type=ADALORA+PeftConfig.total_step=20",
            "start",
            "a new adapter changes outputs",
        ),
    ),
    "peft-2567-conv-groups": (
        Sighting("accelerate", "fsdp2-fp32-w2-model_convolutions-lora", "active", "The size of tensor a .* must match"),
    ),
    "peft-2635-method-as-text": (
        Sighting(
            "mutants.drivers:MethodAsText", "zero2-fp32-w2-lora", "export", "'str' object has no attribute 'value'"
        ),
    ),
    "peft-2646-head-of-prompts": (
        Sighting(
            "mutants.drivers:PromptedClassifier", "ddp-fp32-w2", "parity", r"step 1: .*the gradient norm is .*reference"
        ),
    ),
    "peft-2702-base-of-poly": (
        Sighting("mutants.drivers:SeveralTasks", "ddp-fp32-w2", "evaluation", "KeyError: 'eval_loss'"),
    ),
    "peft-2839-scaled-embeddings": (
        Sighting("accelerate", _WITH_MAGNITUDES, "export", "outputs of the trained and of the reloaded model"),
    ),
    "peft-2883-head-dim": (Sighting("mutants.drivers:Prefixed", "ddp-fp32-w2", "active", "RuntimeError"),),
    "peft-3109-layers-of-config": (
        Sighting("mutants.drivers:Prompted", "ddp-fp32-w2", "active", "Please specify `num_layers`"),
    ),
    "peft-3180-projections-by-hash": (
        Sighting(
            "accelerate",
            "zero2-fp32-w2-lora-set_PeftConfig.peft_type=TINYLORA",
            "parity",
            r"step 1: .*the gradient norm is .* in the reference",
        ),
    ),
    "peft-3199-keywords-alone": (
        Sighting("accelerate", _CALLED_WITH_KEYWORDS, "active", "missing 1 required positional argument: 'x'"),
    ),
    "peft-3396-merged-adapter": (
        Sighting("mutants.drivers:Merged", "ddp-bf16_upcast-w2", "optimizer", "finished reduction in the prior"),
    ),
    "peft-3559-adapter-added-twice": (
        Sighting("mutants.drivers:AddedTwice", "ddp-fp32-w2", "start", "other values after build than were loaded"),
    ),
    "pt-115607-compiled-step": (
        Sighting("mutants.drivers:CompiledStep", "ddp-fp32-w2", "parity", r"step [34]: .*in the reference"),
    ),
    "pt-125708-init-optim-lr": (Sighting("accelerate", "fsdp2-fp32-w2", "resume", "other values after the"),),
    "pt-frozen-shards": (
        Sighting(
            "torch",
            "fsdp2-fp32-w2-model_heads-tp_2-frozen",
            "parity",
            "step 1: .*the gradient norm is .* in the reference",
        ),
    ),
    "pt-fsdp1-group": (
        Sighting("mutants.drivers:ShardedInGroups", "fsdp1-fp32-w4-model_mlp-dp_replicate_2", "resume", "time limit"),
    ),
    "pt-reshard-frozen": (
        Sighting(
            "mutants.drivers:IntegerWeight",
            "fsdp2-fp32-w4-model_mlp-set_fully_shard.reshard_after_forward=2",
            "active",
            "only Tensors of floating point dtype can require gradients",
        ),
    ),
    "pt-squeeze-arguments": (
        Sighting("torch", "fsdp2-fp32-w2-model_heads-tp_2-frozen", "active", "missing value for argument 'dim'"),
    ),
    "pt-strided-safe": (
        Sighting("mutants.drivers:FilesOfRanks", "fsdp2-fp32-w4-tp_2", "resume", "Weights only load failed"),
    ),
    "pt-84803-lost-data": (
        Sighting("accelerate", "fsdp2-fp32-w2", "parity", "step 2: the loss is"),
        Sighting("deepspeed", "zero3-fp32-w2", "parity", "step 1: the loss is"),
    ),
    "tr-25852-fsdp-optim-name": (Sighting("trainer", "fsdp2-fp32-w2-state_dict_full", "resume", "after the load"),),
    "tr-29903-state-dict": (
        Sighting("trainer", "ddp-fp32-w2-model_hf:gpt2", "export", "2 of 29 names are in no exported file"),
    ),
    "tr-33455-epoch-steps": (
        Sighting("trainer", "ddp-fp32-w2-grad_accum_2", "parity", r"train\(\) came back before 'step'"),
    ),
    "tr-34191-ga-token-mean": (Sighting("trainer", "ddp-fp32-w2-grad_accum_2", "parity", "in the reference"),),
    "tr-34242-ddp-token-mean": (Sighting("trainer", "ddp-fp32-w2", "parity", "in the reference"),),
    "tr-36627-save-only": (
        Sighting("trainer", "fsdp2-fp32-w2-save_only_model", "save_only_model", "refused only at|another message"),
    ),
    "tr-37147-fsdp2-delay": (Sighting("trainer", "fsdp2-fp32-w2", "optimizer", "must be passed together"),),
    "tr-45662-ep-load": (
        Sighting("trainer", "fsdp2-fp32-w2-model_hf:gpt_oss-ep_2-save_only_model", "parity", "step 1: the loss is"),
    ),
    "tr-45994-tp-loss": (
        Sighting("trainer", "fsdp2-fp32-w2-tp_2-save_only_model", "parity", r"step 1: the loss is 9\."),
    ),
    "tr-48205-ep-gradients": (
        Sighting(
            "mutants.drivers:SharedBatch",
            "fsdp2-fp32-w2-tp_2-save_only_model",
            "gradients",
            r"step 1: .*the gradient of model\.",
        ),
    ),
    "tr-48687-router": (
        Sighting(
            "mutants.drivers:SharedBatch",
            "fsdp2-fp32-w2-tp_2-save_only_model",
            "gradients",
            r"step 1: .*the gradient of model\.layers\.\d\.mlp\.router",
        ),
    ),
    "tr-batch-sampler-epoch": (
        Sighting("trainer", "ddp-fp32-w2", "coverage", "batch_rebalance: epoch 2 has the order of epoch 1"),
    ),
    "tr-best-barrier": (
        Sighting(
            "trainer",
            "ddp-fp32-w2-model_mlp-set_TrainingArguments.load_best_model_at_end=true",
            "best",
            "other values after the end of the training",
        ),
    ),
    "tr-cpu-device": (Sighting("trainer", "ddp-fp32-w2", "resume", "tagged with cpu:0"),),
    "tr-dp-size": (
        Sighting("trainer", "fsdp2-fp32-w4-tp_2-save_only_model", "active", "does not match num_processes"),
    ),
    "tr-extra-state": (
        Sighting(
            "trainer",
            "fsdp2-fp32-w2-model_llama_calibrated-state_dict_full-save_only_model",
            "export",
            "has no attribute '_extra_state'",
        ),
    ),
    "tr-fsdp-version-ignored": (Sighting("trainer", "fsdp2-fp32-w2", "active", "expected FSDP2"),),
    "tr-grown-head": (Sighting("accelerate", _GROWN, "active", "The size of tensor a .* must match"),),
    "tr-init-of-children": (
        Sighting(
            "accelerate",
            "zero3-fp32-w2-model_hf:afmoe-loaded_from_config",
            "start",
            "router.gate.weight': other values after build than were loaded",
        ),
    ),
    "tr-mesh-groups": (
        Sighting(
            "mutants.drivers:SharedBatch",
            "fsdp2-fp32-w2-tp_2-save_only_model",
            "optimizer",
            "mixed torch.Tensor and DTensor",
        ),
    ),
    "tr-nan-losses": (Sighting("trainer", "ddp-fp32-w2", "evaluation", "no labels: loss is nan"),),
    "tr-numpy-labels": (Sighting("trainer", "ddp-fp32-w2", "evaluation", "Long or Byte, but got Float"),),
    "tr-numbered-parts": (
        Sighting("trainer", "ddp-fp32-w2-model_hf:qwen4_exp_text", "export", "other values|outputs of the trained"),
    ),
    "tr-saves-on-rank-0": (
        Sighting("trainer", "fsdp2-fp32-w2-tp_2-save_only_model", "names", "collective mismatch|time limit|SIGABRT"),
    ),
    "tr-scaler-state": (
        Sighting("mutants.drivers:ScalesLosses", "ddp-fp32-w2", "resume", "the gradient scaler is at .* saved at"),
    ),
    "tr-shift-count": (Sighting("trainer", "ddp-fp32-w2", "parity", "in the reference"),),
    "tr-shift-of-decoder": (
        Sighting(
            "trainer",
            "ddp-fp32-w2-model_hf:CanaryForConditionalGeneration",
            "parity",
            "step 1: the loss is .*reference",
        ),
    ),
    "tr-tokenizer-of-collator": (
        Sighting("mutants.drivers:WithTokenizer", "ddp-fp32-w2", "export", "instantiate the backend tokenizer"),
    ),
    "tr-uncounted-data": (Sighting("trainer", "ddp-fp32-w2", "coverage", "count.. tells the length"),),
}

"""accelerate 1.15.0, torch 2.13.0: FSDP2 cannot prepare BERT, T5, wav2vec2 and models alike.

`fsdp2_prepare_model` makes units of the input embedding and of the tail, after the blocks. Expected: a model trains as it does
under FSDP1. Seen: `Invariant encountered` where the embedding is in a block that is sharded already (BertEmbeddings is in
`_no_split_modules`); `shared with a parameter already managed by another FSDP group` where the tail shares more than the
embedding's weight (the bias of a masked language model's decoder; T5's two stacks); NotImplementedError where
`get_input_embeddings()` raises, as for wav2vec2.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29579",
}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}

import torch
import transformers
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

small = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
models = {
    "BERT": transformers.BertForMaskedLM(transformers.BertConfig(**small)),
    "MegatronBERT": transformers.MegatronBertForMaskedLM(transformers.MegatronBertConfig(**small)),
    "T5": transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ),
    "wav2vec2": transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(**small, conv_dim=(32,) * 7, num_conv_pos_embeddings=16)
    ),
}
# accelerate takes FSDP for accelerators only; this has it on the CPU.
PartialState(cpu=True)
PartialState().distributed_type = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
)
accelerator = Accelerator(fsdp_plugin=plugin)
found = {}
for name, model in models.items():
    plugin.transformer_cls_names_to_wrap = None  # it keeps those of the first model
    try:
        prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        if name == "T5":  # the check of torch runs before the first forward
            ids = torch.ones(1, 4, dtype=torch.long)
            prepared(input_ids=ids, labels=ids)
        if "BERT" in name:
            prepared(input_ids=torch.ones(1, 4, dtype=torch.long))
    except (NotImplementedError, TypeError, ValueError) as error:
        found[name] = f"{type(error).__name__}: {error}"[:90]
torch.distributed.destroy_process_group()

print("SEEN" if len(found) == len(models) else "GONE", found)

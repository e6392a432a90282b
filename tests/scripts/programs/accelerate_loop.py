"""accelerate's own training loop, as its documentation writes it."""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny import Rows, bert, model  # type: ignore[import-not-found]  # it lies beside the script
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", type=Path)
parser.add_argument("--adapter", action="store_true")
parser.add_argument("--bert", action="store_true")
parser.add_argument("--inside", action="store_true")
arguments = parser.parse_args()


class Around(torch.nn.Module):
    """A model of which another one is a part that is saved by itself, as sentence-transformers has it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.inner(**batch)


accelerator = Accelerator()
net = bert() if arguments.bert else model()
if arguments.adapter:
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    net = get_peft_model(net, LoraConfig(target_modules=["q_proj", "v_proj"]), autocast_adapter_dtype=False)
    if getattr(accelerator.state.fsdp_plugin, "fsdp_version", 2) == 1:
        # As PEFT's documentation has it: https://huggingface.co/docs/peft/accelerate/fsdp
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(net)
if arguments.inside:
    net = Around(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
data = DataLoader(Rows(), batch_size=2, shuffle=True)
net, optimizer, data, scheduler = accelerator.prepare(net, optimizer, data, scheduler)
done = 0
if arguments.resume:
    accelerator.load_state(str(arguments.resume))
    done = int(arguments.resume.name.rpartition("-")[2])
net.train()
for batch in accelerator.skip_first_batches(data, done) if done else data:
    if done == arguments.steps:
        break
    loss = net(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    done += 1
    print(f"step {done} loss {float(loss).hex()}", flush=True)
    if done == arguments.save_at:
        accelerator.save_state(str(arguments.output / f"step-{done}"))
if arguments.output:
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(net)
    unwrapped = accelerator.unwrap_model(net)
    if arguments.inside:
        state = {name.removeprefix("inner."): value for name, value in state.items()}
    (unwrapped.inner if arguments.inside else unwrapped).save_pretrained(
        arguments.output / "final", is_main_process=accelerator.is_main_process, state_dict=state
    )
accelerator.end_training()

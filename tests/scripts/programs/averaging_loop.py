"""Train with accelerate, beside an average of the weights and a curriculum, as scripts of diffusers do."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from tiny import Rows, model  # type: ignore[import-not-found]  # it lies beside the script
from torch.utils.data import DataLoader


class Average:
    """An average of what this rank has of the weights."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}

    def update(self, net: torch.nn.Module) -> None:
        """Move the average towards the weights."""
        for name, weight in net.named_parameters():
            self.weights[name].lerp_(weight.detach(), 0.5)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the average."""
        return self.weights

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the average."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--fault", default="")
    arguments = parser.parse_args()
    accelerator = Accelerator()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, data = accelerator.prepare(net, optimizer, DataLoader(Rows(), batch_size=2))
    average = Average(net)
    if arguments.fault != "not registered":
        accelerator.register_for_checkpointing(average)
    length = {"tokens": 4}
    done = 0
    if arguments.resume:
        accelerator.load_state(str(arguments.resume))
        done = int(arguments.resume.name.rpartition("-")[2])
        if arguments.fault != "curriculum anew":
            length["tokens"] += done
    net.train()
    for batch in accelerator.skip_first_batches(data, done) if done else data:
        if done == arguments.steps:
            break
        accelerator.backward(net(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        average.update(net)
        length["tokens"] += 1
        done += 1
        if done == arguments.save_at:
            accelerator.save_state(str(arguments.output / f"step-{done}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

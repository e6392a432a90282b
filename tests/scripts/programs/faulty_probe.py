"""Small trainings, each in a process of its own with the probe in it: once as it is, then once for each of the probe's places
that the training came by, and there the probe raises. What came of them is one file of JSON.

``python faulty_probe.py DIRECTORY PART PLACE...`` in the environment of a launched script; its only rank is each child. It raises
at these places, or if none is named at all that there are.
"""

import atexit
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # what optimizers import at their first step, once for all children
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch.distributed.checkpoint import state_dict, state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from pytest_distcompat import launch, probe
from pytest_distcompat.ext.scripts import guard, recorder
from pytest_distcompat.ext.scripts.environment import RUN

HERE = Path(sys.argv[1])
OURS = str(Path(guard.__file__).parents[1])
#: The library of each part, imported once for all its children.
if "accelerate" in sys.argv:
    from accelerate import Accelerator
if "trainer" in sys.argv:
    from tiny import Rows, model  # type: ignore[import-not-found]  # it lies beside the script
    from transformers import Trainer, TrainingArguments
if "deepspeed" in sys.argv:
    import deepspeed
if "lightning" in sys.argv:
    import pytorch_lightning
del launch, probe, recorder
real, seen, outside = guard.attempt, list[str](), set[str]()


def attempt(where: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def called(*given: Any, **named: Any) -> Any:
        seen.append(where)
        if where == fault:
            raise RuntimeError("broken on purpose")
        return function(*given, **named)

    return real(where, called, *args, **kwargs)


def profile(frame: FrameType, event: str, _: Any) -> None:
    """Note what of ours is called without the guard around it."""
    # At the very end of the process there are no names any more.
    if event != "call" or not OURS or not frame.f_code.co_filename.startswith(OURS):
        return
    above = frame.f_back
    while above is not None and above.f_code is not real.__code__:
        above = above.f_back
    if above is None:
        outside.add(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))


def steps(model: Any, optimizer: Any, backward: Callable[[Any], Any], count: int = 7) -> list[float]:
    """More than are looked at in full."""
    losses = []
    for number in range(count):
        loss = model(torch.full((2, 4), 0.1 * number)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def of_loop(to: Path) -> list[float]:
    wrapped = torch.nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    losses = steps(wrapped, optimizer, lambda loss: loss.backward(), 2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = wrapped(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    losses.append(float(optimizer.step(closure)))
    losses += steps(wrapped, optimizer, lambda loss: loss.backward(), 4)
    torch.save(wrapped.module.state_dict(), to / "model.pt")
    torch.load(to / "model.pt")
    return losses


def of_checkpoints(to: Path) -> list[float]:
    wrapped = torch.nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    losses = steps(wrapped, optimizer, lambda loss: loss.backward(), 2)
    parts, states = state_dict.get_state_dict(wrapped, optimizer)
    saved = {"model": parts, "optimizer": states}
    dcp.save(saved, checkpoint_id=to / "dcp")  # type: ignore[attr-defined]
    dcp.load(saved, checkpoint_id=to / "dcp")  # type: ignore[attr-defined]
    dcp.async_save(saved, checkpoint_id=to / "async").result()  # type: ignore[attr-defined,union-attr]
    # Where they are defined, and each half of a state by itself.
    state_dict_saver.save(saved, checkpoint_id=to / "defined")
    state_dict_saver.async_save(saved, checkpoint_id=to / "defined-async").result()  # type: ignore[union-attr]
    state_dict_loader.load(saved, checkpoint_id=to / "defined")
    state_dict.set_state_dict(wrapped, optimizer, model_state_dict=parts, optim_state_dict=states)
    states = state_dict.get_optimizer_state_dict(wrapped, optimizer)
    state_dict.set_optimizer_state_dict(wrapped, optimizer, optim_state_dict=states)
    save_file(wrapped.module.state_dict(), to / "file.safetensors")
    save_model(wrapped.module, str(to / "model.safetensors"))
    return losses + steps(wrapped, optimizer, lambda loss: loss.backward(), 2)


def of_wrappers(to: Path) -> list[float]:
    del to
    first: Any = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    losses = steps(first, torch.optim.SGD(first.parameters(), lr=0.1), lambda loss: loss.backward(), 1)
    second = net()
    fully_shard(second, mesh=init_device_mesh("cpu", (1,)))
    compiled = torch.compile(second, backend="eager")
    second.compile(backend="eager")
    return losses + steps(compiled, torch.optim.SGD(second.parameters(), lr=0.1), lambda loss: loss.backward(), 2)


def of_accelerate(to: Path) -> list[float]:
    """The model is prepared twice, as sound scripts have it."""
    accelerator = Accelerator(cpu=True)
    wrapped = accelerator.prepare(net())
    wrapped, optimizer = accelerator.prepare(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(AveragedModel(net()))
    losses = steps(wrapped, optimizer, accelerator.backward)
    accelerator.save_state(str(to / "state"))
    accelerator.load_state(str(to / "state"))
    accelerator.save_model(wrapped, str(to / "model"))
    accelerator.end_training()
    return losses


def of_trainer(to: Path) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(to / "out"), max_steps=4, save_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
    )
    trainer = Trainer(model=model(), args=arguments, train_dataset=Rows(8))
    loss = trainer.train().training_loss
    trainer.save_model(str(to / "final"))
    return [loss]


def of_deepspeed(to: Path) -> list[float]:
    engine, *_ = deepspeed.initialize(
        model=net(),
        optimizer=None,
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}},
    )
    losses = []
    for _ in range(4):
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.save_checkpoint(str(to / "state"))
    engine.load_checkpoint(str(to / "state"))
    return losses


def of_lightning(to: Path) -> list[float]:
    losses: list[float] = []

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def training_step(self, batch: list[torch.Tensor], _number: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            losses.append(float(loss))
            return loss

    settings: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pytorch_lightning.Trainer(accelerator="cpu", devices=1, strategy="ddp", max_steps=4, **settings)
    module = Module()
    # Of a list Lightning takes each element for data of its own.
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))
    trainer.save_checkpoint(to / "state.ckpt")
    again = pytorch_lightning.Trainer(accelerator="cpu", devices=1, strategy="ddp", max_steps=6, **settings)
    again.fit(Module(), DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=2), ckpt_path=to / "state.ckpt")
    return losses


def of_a_script_that_fails(to: Path) -> list[float]:
    del to
    raise ValueError("what the script raises itself")


PARTS: dict[str, Callable[[Path], list[float]]] = {
    "loop": of_loop,
    "checkpoints": of_checkpoints,
    "wrappers": of_wrappers,
    "accelerate": of_accelerate,
    "trainer": of_trainer,
    "deepspeed": of_deepspeed,
    "lightning": of_lightning,
    "fails": of_a_script_that_fails,
}


def run(part: str, to: Path, *, watched: bool) -> None:
    """Be the rank of that run, in this process."""
    if watched:
        sys.setprofile(profile)
    os.environ |= {RUN: str(to), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    (to / "losses.json").write_text(json.dumps(PARTS[part](to)), encoding="utf-8")
    sys.setprofile(None)


def note(to: Path) -> None:
    """Write down what was called."""
    (to / "noted.json").write_text(json.dumps({"seen": seen, "outside": sorted(outside)}), encoding="utf-8")


guard.attempt = attempt
notes_by_fault: dict[str, dict[str, Any]] = {}
_, _, part, *only = sys.argv
wanted = [""]
while wanted:
    fault = wanted.pop()
    to = HERE / str(len(notes_by_fault))
    to.mkdir(parents=True)
    shutil.copy(HERE / "probe.json", to)
    sys.stdout.flush()
    if not (child := os.fork()):
        # It is called last, after the probe's own.
        atexit.register(note, to)
        run(part, to, watched=not fault)
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    noted = json.loads((to / "noted.json").read_text(encoding="utf-8"))
    wrote = (to / "losses.json").read_text(encoding="utf-8") if (to / "losses.json").exists() else "null"
    code = os.waitstatus_to_exitcode(status)
    notes_by_fault[fault] = {**noted, "losses": json.loads(wrote), "code": code, "directory": str(to)}
    if not fault:
        wanted = sorted(set(noted["seen"]) & set(only) if only else set(noted["seen"]))
(HERE / "found.json").write_text(json.dumps(notes_by_fault), encoding="utf-8")

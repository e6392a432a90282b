"""Script that shows a walk without this plugin: the methods that are called, the model and the reference, as they stand here."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers._calls import CLIP_VALUE, SLOWER, Calls
from pytest_distcompat.drivers._tiny import DECAY, EPOCH_STEPS, GAMMA, LEARNING_RATE
from pytest_distcompat.strategies._base import MAX_NORM
from pytest_distcompat.walk.sequence import Walk

_HEAD = '''"""{walk}

{finding}

torchrun --nproc-per-node {ranks} THIS_FILE
"""
from __future__ import annotations

import contextlib
import copy
import math
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.nn import functional

MAX_NORM, CLIP_VALUE, SLOWER, EPOCH = {max_norm}, {clip_value}, {slower}, {epoch}
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def training(method): return method
def observer(method): return method

'''

_TAIL = """

def batch(number, rank):
    generator = torch.Generator().manual_seed(1000 * (number % EPOCH) + rank)
    return torch.randn(4, 7, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def loss(model, number, rank):
    features, labels = batch(number, rank)
    return functional.cross_entropy(model(features), labels)


def make():
    torch.manual_seed(0)
    return MLP(7, 13, 5)


def optimizer_of(model, every=1):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr={rate}, weight_decay={decay})
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=every, gamma={gamma})


def trainer_of(model, optimizer, scheduler, **more):
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, epoch=EPOCH, loss=loss,
                           outputs=lambda model: model(batch(999, 0)[0]), **more)


def build():
    model = make()
{build}


def state(model):
    return [(n, p.dtype, p.requires_grad) for n, p in model.named_parameters()], [m.training for m in model.modules()]


box = [tempfile.mkdtemp() if RANK == 0 else ""]
if not distributed.is_initialized():
    distributed.init_process_group("gloo")
trainer, model = build(), make()
reference = Calls(trainer_of(model, *optimizer_of(model)), Path(), range(RANKS))
distributed.broadcast_object_list(box)
live = {kind}(trainer, Path(box[0]), [RANK])
seen = False
for call in {calls}:
    name, before = call.partition("(")[0], state(live.model)
    if name == "resume":
        live.save()
        live.trainer = build()
        live.load()
        eval("reference." + call)
    else:
        eval("live." + call)
        if hasattr(reference, name):
            eval("reference." + call)
        elif state(live.model) != before:
            seen = True
            print(f"rank {{RANK}}: {{call}} changed names, dtypes, requires_grad or modes")
off = float((live.outputs() - reference.outputs()).abs().max())
print(f"rank {{RANK}}: outputs are {{off:.2g}} off those of one process:", "SEEN" if seen or not off < 1e-4 else "GONE")
distributed.destroy_process_group()
"""


def script(cell: Cell, walk: Walk, finding: str) -> str | None:
    """Return a script for torchrun that does the calls of a walk, and two steps after them; None if the driver has none."""
    built = walk.kind.script.get(cell.strategy)
    if built is None:
        return None
    from pytest_distcompat.models import _modules

    calls = [*map(str, walk.calls), *["step()"] * 2]
    numbers = {"max_norm": MAX_NORM, "clip_value": CLIP_VALUE, "slower": SLOWER, "epoch": EPOCH_STEPS}
    head = _HEAD.format(walk=walk, finding=finding, ranks=cell.world_size, **numbers)
    tail = _TAIL.format(
        build=textwrap.indent(textwrap.dedent(built).strip(), "    "),
        calls=calls,
        kind=walk.kind.__name__,
        rate=LEARNING_RATE,
        decay=DECAY,
        gamma=GAMMA,
    )
    model = "\n\n".join(map(inspect.getsource, (_modules.Block, _modules.MLP)))
    return "\n\n".join((head.rstrip(), *_classes(walk.kind, [call.partition("(")[0] for call in calls]), model)) + tail


def _classes(kind: type[Calls], names: Sequence[str]) -> list[str]:
    """Return the source of the classes, with no more methods than the calls need."""
    classes = [one for one in reversed(kind.__mro__) if issubclass(one, Calls)]
    needed, sources = (
        {"__init__", "outputs", "save", "load"} & set(dir(kind)) | set(names),
        dict[tuple[str, str], str](),
    )
    while new := [
        (one, name) for one in classes for name in needed if name in vars(one) and (one.__name__, name) not in sources
    ]:
        for one, name in new:
            member = vars(one)[name]
            source = inspect.getsource(getattr(member, "fget", member))
            sources[one.__name__, name] = source
            needed |= set(re.findall(r"(?:self|super\(\))\.(\w+)", source))
    texts = []
    for one in classes:
        base = "" if one is Calls else f"({one.__bases__[0].__name__})"
        methods = [source for (owner, _), source in sorted(sources.items()) if owner == one.__name__]
        texts.append(f"class {one.__name__}{base}:\n" + "\n".join(methods or ["    pass\n"]))
    return texts

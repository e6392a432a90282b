"""Functions that the ranks of these tests run. Only ranks import them, as ``bodies``."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil

from pytest_distcompat.events import Note
from pytest_distcompat.launch.rank_log import RankLog, read_events

#: Set by a body, to be seen by no later run.
touched = False
_held: list[object] = []


def note(log: RankLog, event: str, **data: Any) -> None:
    """Log an event of the test's own."""
    log.write(Note(event, data))


def noted(event: str, directory: Path, rank: int) -> bool:
    """Return whether that rank has logged such an event."""
    return any(isinstance(note, Note) and note.event == event for note in read_events(directory, rank))


def meet(payload: Mapping[str, Any], log: RankLog) -> None:
    """One all_reduce, and a proper end."""
    from torch import distributed

    note(log, "sum", value=_join())
    distributed.destroy_process_group()


def report_process(payload: Mapping[str, Any], log: RankLog) -> None:
    """Everything that a rank can see of how it was started."""
    import torch

    note(
        log,
        "seen",
        environ=dict(os.environ),
        cwd=str(Path.cwd()),
        threads=torch.get_num_threads(),
        native_threads=psutil.Process().num_threads(),
        cuda=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        forked_after_cuda=torch.cuda._is_in_bad_fork(),
        parent=os.getppid(),
        grandparent=psutil.Process(os.getppid()).ppid(),
        semaphores=_shared_memory(),
        hash=hash("a name"),
        address=id(psutil),
        collection=(gc.isenabled(), *gc.get_threshold()),
    )


def listening(payload: Mapping[str, Any], log: RankLog) -> None:
    """Where the processes of the run accept connections while a group meets."""
    from torch import distributed

    _join()
    launcher = psutil.Process(psutil.Process(os.getppid()).ppid())
    tree = {process.pid for process in (launcher, *launcher.children(recursive=True))}
    connections = [
        connection
        for connection in psutil.net_connections("inet")
        if connection.pid in tree and connection.status == psutil.CONN_LISTEN
    ]
    note(log, "listening", addresses=[connection.laddr.ip for connection in connections if connection.laddr])
    distributed.destroy_process_group()


def touch(payload: Mapping[str, Any], log: RankLog) -> None:
    """Change process state, and note its value before."""
    import json

    note(log, "before", touched=touched, attribute=hasattr(json, "touched"), variable=os.environ.get("TOUCHED"))
    globals()["touched"] = True
    json.touched = True  # type: ignore[attr-defined]
    os.environ["TOUCHED"] = "1"
    os.chdir("/")


def share_files(payload: Mapping[str, Any], log: RankLog) -> None:
    """torch's other way to share tensors: files that a process of its own unlinks. Then what ``payload["acts"]`` has."""
    import torch
    from torch import multiprocessing

    multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    # Its file lives as long as it does.
    _held.append(torch.ones(1000).share_memory_())  # type: ignore[no-untyped-call]
    note(log, "shared", names=[path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")])
    # A process that is being started when its rank dies is torch's to tidy up.
    ranks = range(int(os.environ["WORLD_SIZE"]))
    while not all(noted("shared", log.path.parent, rank) for rank in ranks):
        time.sleep(0.01)
    ACTS[payload["acts"][str(log.rank)]](log)


def act(payload: Mapping[str, Any], log: RankLog) -> None:
    """All ranks meet; then each does what ``payload["acts"]`` has for it. Who is not named waits for the others."""
    assert _join() == sum(range(int(os.environ["WORLD_SIZE"])))
    ACTS[payload["acts"].get(os.environ["RANK"], "wait")](log)


def act_alone(payload: Mapping[str, Any], log: RankLog) -> None:
    """Lose a peer without a process group: no rank notices that it is gone."""
    ACTS[payload["acts"].get(os.environ["RANK"], "sleep")](log)


def dispatched(payload: Mapping[str, Any], log: RankLog) -> None:
    """The names under which a dispatch mode sees a collective."""
    import torch
    from torch import distributed
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            note(log, "operator", namespace=func.namespace, name=func._schema.name)
            return func(*args, **(kwargs or {}))

    _join()
    number = torch.ones(1)
    with Names():  # type: ignore[no-untyped-call]
        distributed.all_reduce(number)
    distributed.destroy_process_group()


def grouped(payload: Mapping[str, Any], log: RankLog) -> None:
    """The ranks of the group that an operator of each kind is called with: c10d, functional, one without a group."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from pytest_distcompat.probe.operators import group_ranks

    class Groups(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in {"c10d", "_c10d_functional"}:
                note(log, "operator", name=func._schema.name, ranks=group_ranks(func, args))
            return func(*args, **(kwargs or {}))

    _join()
    part = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with Groups():  # type: ignore[no-untyped-call]
        distributed.all_reduce(torch.ones(1))
        part.full_tensor()
    distributed.destroy_process_group()


def watched(payload: Mapping[str, Any], log: RankLog) -> None:
    """Record collectives while the probe watches, while it computes itself, and when it has stopped."""
    import torch
    from torch import distributed
    from torch.utils.flop_counter import FlopCounterMode

    from pytest_distcompat.probe.observe import Observer

    _join()
    observer, number = Observer(), torch.ones(1)

    def reduce(when: str) -> None:
        distributed.all_reduce(number)
        note(log, "seen", when=when, calls=sum(map(len, observer.collectives.values())))
        observer.restart()

    reduce("before")
    with observer.watching():
        reduce("watching")
        observer.record_operators(on=True)
        reduce("closely")
        with observer.aside():
            reduce("aside")
        reduce("closely again")
        observer.record_operators(on=False)
        reduce("not closely")
        # A trainer that reports a step inside a mode of its own, and another one that enters one after its report.
        with FlopCounterMode(display=False):
            observer.record_operators(on=True)
            with FlopCounterMode(display=False):
                reduce("below another mode")
                observer.record_operators(on=False)
                reduce("still below it")
            reduce("below the first")
        reduce("below none")
        observer.record_operators(on=False)
        reduce("looked away")
    reduce("after")
    distributed.destroy_process_group()


def zero1(payload: Mapping[str, Any], log: RankLog) -> None:
    """Return DeepSpeed's private attributes of a parameter, and its table of operators."""
    import deepspeed
    import torch
    from torch import distributed

    from pytest_distcompat.launch.deepspeed_cpu import OPERATOR

    table = dict(getattr(deepspeed.ops, "__compatible_ops__", {}))
    note(log, "operators", known=OPERATOR in table, names=sorted(table))
    deepspeed.ops.__compatible_ops__[OPERATOR] = False
    model = torch.nn.Linear(4, 3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    note(log, "accumulates", dtype=str(getattr(engine.optimizer, "gradient_accumulation_dtype", "absent")))
    note(log, "scaler", there=hasattr(engine.optimizer, "loss_scaler"))
    for name, parameter in engine.module.named_parameters():
        mapping = getattr(parameter, "_hp_mapping", "absent")
        address = getattr(mapping, "lp_fragment_address", None)
        note(
            log,
            "parameter",
            name=name,
            numel=parameter.numel(),
            kept=mapping if mapping == "absent" else type(mapping).__name__,
            held=getattr(address, "numel", None),
            group=distributed.get_process_group_ranks(getattr(parameter, "_dp_group", None)),
        )
    distributed.destroy_process_group()


def compiled(payload: Mapping[str, Any], log: RankLog) -> None:
    """Return torch's private attributes of a compiled module, of its graphs, and of a module that recomputes."""
    import torch

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.ext.upstream.drivers._options import recompute
    from pytest_distcompat.probe.live import read_model

    class Block(torch.nn.Linear):
        """One of our own: torch leaves its own layers alone if they are compiled in place."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    model = torch.nn.Sequential(Block(4, 4), torch.nn.Linear(4, 4))
    recompute(model, [model[1]], Cell.parse("ddp-fp32-w1"))
    model[0].compile(backend="eager")
    for step in ("before", "after"):
        info = read_model(model, None, None)
        note(log, "fact", step=step, compiled=info.compiled, checkpointed=info.checkpointed, graphs=info.graphs)
        model(torch.ones(2, 4)).sum().backward()


def autotp(payload: Mapping[str, Any], log: RankLog) -> None:
    """How DeepSpeed has cut a layer by AutoTP, what it calls the layer, and the weights that it gathers."""
    import deepspeed
    import torch

    from pytest_distcompat.ext.upstream.drivers._deepspeed_checkpoints import whole_weights
    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
    from pytest_distcompat.probe.deepspeed_shards import autotp_cut

    without_shared_memory()
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(4))
    specs = {"use_default_specs": False, "layer_specs": [{"patterns": [r"0\.weight$"]}]}
    tensor_parallel = {"autotp_size": 2, "partition_config": specs}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": tensor_parallel,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    layer, norm = engine.module
    bases, cuts = [base.__name__ for base in type(layer).__mro__], [autotp_cut(layer.weight), autotp_cut(norm.weight)]
    shapes = {name: list(whole_weight.shape) for name, whole_weight in whole_weights(engine).items()}
    note(
        log, "cut", bases=bases, cuts=[cut and (cut.shape, cut.dim, cut.first, cut.size) for cut in cuts], shapes=shapes
    )


def experts(payload: Mapping[str, Any], log: RankLog) -> None:
    """How the probe names the experts of DeepSpeed's layer, which values have these names in a checkpoint, and what ZeRO-3 says."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from torch import distributed

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
    from pytest_distcompat.probe.deepspeed_shards import named_parameters
    from pytest_distcompat.probe.layouts import wrapper_layouts
    from pytest_distcompat.probe.tensors import digest

    without_shared_memory()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(distributed.get_rank())

    def engine_of(stage: int) -> Any:
        layer = MoE(4, torch.nn.Linear(4, 4), num_experts=4, ep_size=2)
        model = torch.nn.ModuleDict({"moe": layer, "head": torch.nn.Linear(4, 4)})
        for expert in layer.deepspeed_moe.experts.deepspeed_experts:
            expert.reset_parameters()
        groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]

    engine, directory = engine_of(1), Path(log.path).parent / "checkpoint"
    engine.save_checkpoint(str(directory), tag="a")
    distributed.barrier()
    saved: dict[str, str] = {}
    for path in directory.glob("a/layer_0_expert_*"):
        saved |= {f"module.{name}": digest(expert) for name, expert in torch.load(path).items()}
    layouts = wrapper_layouts(engine)
    parameters = {name: parameter for name, parameter in named_parameters(engine) if "experts" in name}
    note(
        log,
        "experts",
        number=distributed.get_rank(),
        files=len(saved),
        same={name: saved.get(name) == digest(expert) for name, expert in parameters.items()},
        layouts=sorted({(str(layouts[id(expert)]), layouts[id(expert)].holders) for expert in parameters.values()}),
        others=sorted(
            {str(layouts[id(expert)]) for name, expert in named_parameters(engine) if name not in parameters}
        ),
    )
    try:
        engine_of(3)
    except AssertionError as error:
        note(log, "refused", text=str(error))


def secondary(payload: Mapping[str, Any], log: RankLog) -> None:
    """Among how many ranks ZeRO++ has cut weights a second time: when the engine is made, in the step, and after it."""
    import deepspeed
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
    from pytest_distcompat.probe.deepspeed_shards import secondary_ranks

    without_shared_memory()
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)[0]
    ranks_before = [secondary_ranks(engine)]
    register_optimizer_step_pre_hook(lambda *_: ranks_before.append(secondary_ranks(engine)))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    note(log, "secondary", ranks=[ranks_before[0], sorted({*ranks_before[1:]}), secondary_ranks(engine)])


def zero0(payload: Mapping[str, Any], log: RankLog) -> None:
    """The copies that DeepSpeed optimizes without ZeRO."""
    import deepspeed
    import torch
    from torch import distributed

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
    from pytest_distcompat.probe.wrapped_optimizers import master_copies, torch_optimizer

    without_shared_memory()
    model = torch.nn.Linear(4, 3)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters()), config=config
    )
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    copies = master_copies(optimizer)
    for group in torch_optimizer(optimizer).param_groups:
        for parameter in group["params"]:
            note(log, "copy", of=names.get(id(copies.get(id(parameter)))), dtype=str(parameter.dtype))
    distributed.destroy_process_group()


def _join() -> float:
    """A process group, and the sum of all ranks' numbers."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    number = torch.tensor([float(distributed.get_rank())])
    distributed.all_reduce(number)
    return number.item()


def _shared_memory() -> list[str]:
    """The files under /dev/shm that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({line.split()[5] for line in lines if " /dev/shm/" in line})


def wait_for_peers(log: RankLog) -> None:
    import torch
    from torch import distributed

    distributed.all_reduce(torch.zeros(1))


def _wait_briefly(log: RankLog) -> None:
    from datetime import timedelta

    import torch
    from torch import distributed

    group = distributed.new_group([0, 1], timeout=timedelta(seconds=1), use_local_synchronization=True)
    distributed.all_reduce(torch.zeros(1), group=group)


def _meet_and_sleep(log: RankLog) -> None:
    from torch import distributed

    distributed.new_group([0, 1], use_local_synchronization=True)
    fall_asleep(log)


def fall_asleep(log: RankLog) -> None:
    time.sleep(600)


def _raise_value(log: RankLog) -> NoReturn:
    raise ValueError(f"boom on {os.environ['RANK']}")


def _raise_later(log: RankLog) -> NoReturn:
    # Within the grace that rank.leave_failed gives to the others.
    time.sleep(0.1)
    raise TypeError(f"bang on {os.environ['RANK']}")


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class HandfulError(Exception):
    """Cannot be pickled: it holds a file, and its arguments do not fit its constructor."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.file = sys.stdout


def _raise_speechless(log: RankLog) -> NoReturn:
    raise SpeechlessError


def _raise_unpicklable(log: RankLog) -> NoReturn:
    raise HandfulError("hands", "full")


def _interrupt(log: RankLog) -> NoReturn:
    raise KeyboardInterrupt


def _signal(number: int) -> Callable[[RankLog], None]:
    def act(log: RankLog) -> None:
        os.kill(os.getpid(), number)
        time.sleep(600)

    return act


def _deaf(log: RankLog) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(log, "deaf")
    time.sleep(600)


def _once_deaf(then: Callable[[RankLog], None]) -> Callable[[RankLog], None]:
    """Do it when rank 0 ignores SIGTERM."""

    def act(log: RankLog) -> None:
        # Its log may not be there yet: a busy machine starts ranks seconds apart.
        while not noted("deaf", log.path.parent, 0):
            time.sleep(0.01)
        then(log)

    return act


def _leave_child(log: RankLog) -> None:
    note(log, "child", pid=subprocess.Popen(["sleep", "600"]).pid)


def _leave_far_child(log: RankLog) -> None:
    """In a session of its own, its parent gone."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
    pid = subprocess.check_output([sys.executable, "-c", script], start_new_session=True)
    note(log, "child", pid=int(pid))


def _rubbish(log: RankLog) -> None:
    for descriptor in (1, 2):
        for _ in range(80):
            os.write(descriptor, bytes(range(256)) * 256)


def _rubbish_and_die(log: RankLog) -> None:
    _rubbish(log)
    os.write(2, b"\nlast words \xff\xfe\n")
    os._exit(3)


def _close_output(log: RankLog) -> None:
    os.close(1)
    os.close(2)


def _close_output_and_raise(log: RankLog) -> NoReturn:
    _close_output(log)
    _raise_value(log)


def _kill_fork_server(log: RankLog) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def _kill_launcher(log: RankLog) -> None:
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(600)


ACTS: dict[str, Callable[[RankLog], None]] = {
    "wait": wait_for_peers,
    "sleep": fall_asleep,
    "wait a second": _wait_briefly,
    "sleep in a group": _meet_and_sleep,
    "return": lambda log: None,
    "ValueError": _raise_value,
    "TypeError, later": _raise_later,
    "speechless": _raise_speechless,
    "unpicklable": _raise_unpicklable,
    "interrupt": _interrupt,
    "sys.exit 0": lambda log: sys.exit(0),
    "sys.exit 3": lambda log: sys.exit(3),
    "os._exit 0": lambda log: os._exit(0),
    "os._exit 3": lambda log: os._exit(3),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGABRT": _signal(signal.SIGABRT),
    "SIGTERM": _signal(signal.SIGTERM),
    "deaf": _deaf,
    "ValueError, once 0 is deaf": _once_deaf(_raise_value),
    "SIGKILL, once 0 is deaf": _once_deaf(_signal(signal.SIGKILL)),
    "child": _leave_child,
    "far child": _leave_far_child,
    "rubbish": _rubbish,
    "rubbish and os._exit 3": _rubbish_and_die,
    "close output": _close_output,
    "close output, ValueError": _close_output_and_raise,
    "kill the fork server": _kill_fork_server,
    "kill the launcher": _kill_launcher,
}

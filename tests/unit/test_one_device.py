"""Models and batches of a run are on one device; the GPU is pretended, so that no test needs one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pytest_distcompat.calls import REFERENCE_CALL
from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.events import Event, SnapshotTaken
from pytest_distcompat.ext.upstream.drivers import _options
from pytest_distcompat.probe.observe import Observer
from pytest_distcompat.probe.snapshot import read_rng
from pytest_distcompat.run_paths import RunPaths
from pytest_distcompat.scenario import Run
from pytest_distcompat.worker import Rank, move_to_device
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from pytest_distcompat.driver import OnAction
    from pytest_distcompat.launch.rank_log import RankLog

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
#: Operators between devices, whose result is where it was.
CROSSING = {"copy_", "set_"}


class PretendedGPU:
    """Says of some storages that they are on a GPU; an operator that is given tensors of two devices raises, as CUDA does.

    Values are computed on the CPU, so that backward passes, optimizers and numbers read from tensors work.
    """

    def __init__(self) -> None:
        #: Held, so that no other storage gets the same address.
        self.storages: dict[int, torch.UntypedStorage] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        return tensor

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        self.storages.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    @contextlib.contextmanager
    def pretending(self) -> Iterator[None]:
        with _Operators(self), _Functions(self):
            yield


class _Functions(TorchFunctionMode):
    """Answers where a tensor is, moves it, and makes new ones there."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:  # each access makes another
            return GPU if self.gpu.has(args[0]) else func(*args)
        if func is torch.Tensor.cpu:
            return self._move(args[0], CPU)
        if func is torch.Tensor.to:
            return self._move(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
            result = func(*args, **kwargs)
            return tree_map_only(torch.Tensor, self.gpu.put, result)
        return func(*args, **kwargs)

    def _place(self, tensor: torch.Tensor) -> torch.device:
        return GPU if self.gpu.has(tensor) else CPU

    def _move(self, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        # What ``Module.to`` reads its arguments with.
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        current = self._place(tensor)
        wanted = current if device is None else device
        if args and isinstance(args[0], torch.Tensor):
            wanted = self._place(args[0])
        if wanted.type != current.type:
            copy = True
        moved = tensor.to(dtype or tensor.dtype, copy=copy)
        if wanted.type == "cuda":
            return self.gpu.put(moved)
        return self.gpu.take(moved)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """Refuses to mix devices; what an operator computes is where its inputs are."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = func._schema.name.split("::")[1]
        if name in CROSSING:
            return result
        # A number from the CPU may take part on a GPU.
        devices = {self.gpu.has(tensor) for tensor in given if tensor.dim()}
        if len(devices) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but got cpu and cuda:0 in {name}")
        if any(map(self.gpu.has, given)):
            tree_map_only(torch.Tensor, self.gpu.put, result)
        return result


class Log:
    """Collects what a rank logs."""

    def __init__(self) -> None:
        self.snapshots: list[dict[str, Any]] = []

    def write(self, event: Event) -> None:
        if isinstance(event, SnapshotTaken):
            self.snapshots.append(dict(event.snapshot))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGPU]:
    """Pretend a GPU, which has a generator of its own."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _device: torch.zeros(8, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 1)
    made = PretendedGPU()
    with made.pretending():
        yield made


def perform(driver: Driver, run: Run, directory: Path) -> list[dict[str, Any]]:
    """Perform a run of one process, and return its snapshots."""
    log = Log()
    rank_of(driver, run, directory, log).perform()
    return log.snapshots


def rank_of(driver: Driver, run: Run, directory: Path, log: Log) -> Rank:
    """Return the only rank of a run, all of whose files are in this directory."""
    return Rank(driver, run, paths_in(directory), Observer(), cast("RankLog", log))


def paths_in(directory: Path) -> RunPaths:
    return RunPaths(directory, directory, directory, 2)


def make(name: str, strategy: str, option: str = "model_mlp") -> Any:
    kind = DRIVERS.get(name)
    return kind(Cell.parse(f"{strategy}-fp32-w1-{option}"), World(0, 1, 0, str(GPU)))


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    return {tensor.device for tensor in tensors}


ALL = pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("torch", "ddp"),
        ("accelerate", "fsdp2"),
        ("trainer", "ddp"),
        ("deepspeed", "zero2"),
    ],
)
#: With tied weights, with buffers, and with an adapter.
OPTIONS = pytest.mark.parametrize("option", ["model_mlp", "model_llama", "model_llama_tied", "model_batchnorm", "lora"])


def test_pretended_gpu_refuses_to_mix_devices(gpu: PretendedGPU) -> None:
    layer = torch.nn.Linear(2, 2)
    row = torch.ones(1, 2).to("cuda:0")
    assert row.device == GPU
    assert gpu.has(row * 2) is True
    with pytest.raises(RuntimeError, match="same device"):
        layer(row)
    layer.to("cuda:0")(row).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == GPU
    assert layer.weight.cpu().device == CPU


@ALL
@OPTIONS
def test_reference_is_where_its_batches_are(
    name: str, strategy: str, option: str, gpu: PretendedGPU, tmp_path: Path
) -> None:
    driver = make(name, strategy, option)
    run = Run("reference", ("build_model", "reference", "reference"))
    _, *steps = perform(driver, run, tmp_path)
    assert len(steps) == 2
    for step in steps:
        assert step["loss"] > 0
        assert step["grad_norm"] > 0
    states = []
    for state in driver.optimizer.state.values():
        # The count of steps is a number, which stays on the CPU.
        states += [value for value in state.values() if value.dim()]
    assert devices_of(states) == {GPU}


@ALL
@OPTIONS
def test_reloaded_model_is_where_the_held_out_batch_is(
    name: str, strategy: str, option: str, gpu: PretendedGPU, tmp_path: Path
) -> None:
    driver = make(name, strategy, option)
    built = driver.build_model()
    state = built.state_dict()
    if "tied" in option:
        del state["lm_head.weight"]
    export = paths_in(tmp_path).export
    export.mkdir(parents=True, exist_ok=True)
    _options.write_whole(built, state, export)
    log = Log()
    rank = rank_of(driver, Run("reload", ("reload", "evaluate")), tmp_path, log)
    rank.perform()
    assert log.snapshots[1]["outputs"]
    assert rank.unwrapped is not None
    assert devices_of(rank.unwrapped.parameters()) == {GPU}


@ALL
def test_model_for_the_trainer_stays_where_the_driver_made_it(
    name: str, strategy: str, gpu: PretendedGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Module] = []
    driver = make(name, strategy)

    def train(model: Module, _plan: object, report: OnAction) -> None:
        given.append(model)
        report("build")

    monkeypatch.setattr(driver, "train", train)
    monkeypatch.setattr(Rank, "_snapshot", lambda *_, **__: {})
    perform(driver, Run("train", ("build_model", "build")), tmp_path)
    assert devices_of(given[0].parameters()) == {CPU}


@ALL
def test_walk_in_one_process_is_where_its_batches_are(
    name: str, strategy: str, gpu: PretendedGPU, tmp_path: Path
) -> None:
    calls = (
        "step(clip='value', zero='zeros')",
        "micro()",
        "zero_grad()",
        "save()",
        "step()",
        "load()",
        "evaluate()",
        "accessors()",
    )
    actions = [f"{REFERENCE_CALL}{call}" for call in calls]
    run = Run("called", ("build_model", *actions), records_calls=True)
    driver = make(name, strategy)
    snapshots = perform(driver, run, tmp_path)
    assert len(snapshots) == 1 + len(calls)
    assert devices_of(driver.model.parameters()) == {GPU}


@ALL
def test_overflow_evaluation_and_loss_of_a_model_on_the_gpu(name: str, strategy: str, gpu: PretendedGPU) -> None:
    driver = make(name, strategy)
    driver.model = driver.build_model()
    move_to_device(driver.model, str(GPU))
    with driver.overflowing():
        driver.loss(driver.model, 0, 0).backward()
    gradients = [parameter.grad for parameter in driver.model.parameters() if parameter.grad is not None]
    assert not all(gradient.isfinite().all() for gradient in gradients)
    assert driver.evaluate(driver.model).device == GPU


@ALL
def test_random_states_of_a_checkpoint_are_those_of_the_gpu_too(
    name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {str(GPU): torch.arange(8, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    driver = make(name, strategy)
    driver.save_random(tmp_path)
    cpu = torch.get_rng_state()
    before = read_rng(str(GPU))
    torch.rand(1)
    states[str(GPU)] += 1
    driver.load_random(tmp_path, required=True)
    assert states[str(GPU)].tolist() == list(range(8))
    assert torch.equal(torch.get_rng_state(), cpu)
    assert read_rng(str(GPU)) == before


class StoppedError(Exception):
    """Ends a call as soon as it has made the object that says where it runs."""


@pytest.mark.parametrize(
    ("name", "strategy", "made", "argument"),
    [
        ("accelerate", "fsdp2", "accelerate.Accelerator", "cpu"),
        ("trainer", "ddp", "transformers.TrainingArguments", "use_cpu"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_loaders_and_metrics_are_of_the_ranks_device(
    name: str, strategy: str, made: str, argument: str, *, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def stop(**settings: Any) -> None:
        asked.append(settings[argument])
        raise StoppedError

    monkeypatch.setattr(made, stop)
    kind = DRIVERS.get(name)
    driver = kind(Cell.parse(f"{strategy}-fp32-w1"), World(0, 1, 0, device))
    with pytest.raises(StoppedError):
        list(driver.rows("shuffle", 4, (0, 0), tmp_path))
    with pytest.raises(StoppedError):
        driver.metrics(4)
    on_cpu = device == "cpu"
    assert asked == [on_cpu, on_cpu]


class Own(Driver):
    """A user's driver, which leaves every model where it is, and puts batches on the rank's device."""

    options: ClassVar[tuple[str, ...]] = ()

    def build_model(self) -> Module:
        torch.manual_seed(0)
        first = torch.nn.Linear(3, 3)
        second = torch.nn.Linear(3, 3)
        second.weight = first.weight
        return torch.nn.Sequential(first, torch.nn.BatchNorm1d(3), second)

    def reload(self, directory: Path) -> Module:
        return self.build_model()

    def evaluate(self, model: Module) -> torch.Tensor:
        rows = torch.ones(2, 3, device=self.world.device)
        with torch.no_grad():
            outputs: torch.Tensor = model.eval()(rows)
        return outputs

    def loss(self, model: Module, number: int, rank: int) -> torch.Tensor:
        rows = torch.arange(6.0).view(2, 3) + number + rank
        outputs: torch.Tensor = model(rows.to(self.world.device))
        return outputs.square().mean()

    def make_optimizer(self, model: Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("actions", [("build_model", "reference", "reference"), ("reload", "evaluate")])
def test_models_of_a_driver_of_ones_own_are_moved(actions: tuple[str, ...], gpu: PretendedGPU, tmp_path: Path) -> None:
    driver = Own(Cell.parse("ddp-fp32-w1"), World(0, 1, 0, str(GPU)))
    rank = rank_of(driver, Run("own", actions), tmp_path, Log())
    rank.perform()
    model: Any = rank.unwrapped
    assert devices_of(model.parameters()) == {GPU}
    assert devices_of(model.buffers()) == {GPU}
    assert model[0].weight is model[2].weight


def test_hooks_and_optimizer_of_a_moved_model_stay(gpu: PretendedGPU) -> None:
    model = torch.nn.Linear(2, 2)
    weight = model.weight
    reached = list[torch.Tensor]()
    weight.register_post_accumulate_grad_hook(reached.append)  # type: ignore[no-untyped-call]
    move_to_device(model, "cuda:0")
    model(torch.ones(1, 2, device="cuda:0")).sum().backward()
    assert model.weight is weight
    assert reached == [weight]


def test_tensors_without_values_stay_and_the_others_are_moved(gpu: PretendedGPU) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2),
        torch.nn.Linear(2, 2, device="meta"),
        torch.nn.Linear(2, 2),
    )
    model[2].weight = model[0].weight
    move_to_device(model, "cuda:0")
    assert model[2].weight is model[0].weight
    assert model[0].weight.device == GPU
    assert model[1].weight.device.type == "meta"


def test_model_that_is_there_already_is_not_asked_to_move(gpu: PretendedGPU) -> None:
    class Refuses(torch.nn.Linear):
        def to(self, *_: Any, **__: Any) -> Any:
            raise ValueError("`.to` is not supported")

    model = Refuses(2, 2, device="cuda:0")
    move_to_device(model, "cuda:0")
    assert model.weight.device == GPU


def test_what_is_no_model_is_left_to_the_check_of_what_the_driver_returned() -> None:
    move_to_device(None, "cuda:0")

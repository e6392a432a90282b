"""The probe reads optimizers of any kind and schedulers of any library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_distcompat.digests import combine
from pytest_distcompat.probe.gradients import read_gradients
from pytest_distcompat.probe.live import read_model, read_unwrapped
from pytest_distcompat.probe.observe import Observer
from pytest_distcompat.probe.optimizer import read_optimizer, read_scheduler
from pytest_distcompat.probe.snapshot import read_snapshot_fields, sample
from pytest_distcompat.probe.tensors import digest, stored_dtype, stored_parts


def test_a_wrong_optimizer_is_an_error() -> None:
    model = torch.nn.Linear(2, 2)
    message = r"^Linear has no param_groups: self\.optimizer of the driver is to be .*; of several, a list$"
    for wrong in (model, [torch.optim.SGD([model.weight]), model]):
        with pytest.raises(TypeError, match=message):
            read_optimizer(model, wrong)


@pytest.mark.parametrize("wrong", [None, {"model": 1}])
def test_a_wrong_model_is_an_error(wrong: Any) -> None:
    """The message names the driver's attribute, not one of the probe."""
    message = r"^the driver's self\.model is .*; expected a torch\.nn\.Module, build\(\) is to "
    with pytest.raises(TypeError, match=message):
        read_snapshot_fields(wrong, None, device="cpu", whole=False)
    message = r"^the unwrapped model is .*, which build_model\(\) and reload\(\) return$"
    with pytest.raises(TypeError, match=message):
        read_unwrapped(wrong)


def test_a_wrong_scheduler_is_an_error() -> None:
    message = r"^self\.scheduler of the driver is a str: 'cosine'; expected the scheduler, None, or of several a list$"
    with pytest.raises(TypeError, match=message):
        read_scheduler("cosine")


@pytest.mark.parametrize("wrong", [None, 1.5])
def test_what_evaluate_returns_is_a_tensor(wrong: Any) -> None:
    message = r"^evaluate\(\) returned (None|1\.5); expected a tensor: what the model computes"
    with pytest.raises(TypeError, match=message):
        sample(wrong)


def test_outputs_are_of_many_classes() -> None:
    logits = torch.arange(128).expand(2, 16, 128)
    assert len(set(sample(logits))) == 32
    assert sample(torch.tensor(1.5)) == (1.5,)


def test_a_world_size_as_text_is_a_number() -> None:
    assert read_model(torch.nn.Linear(2, 2), None, "2").trainer_world_size == 2  # type: ignore[arg-type]


def test_several_optimizers_are_read_as_one() -> None:
    model = torch.nn.Linear(2, 2)
    stale = torch.nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([model.weight], lr=0.5)
    adamw = torch.optim.AdamW([model.bias, stale], lr=0.25)
    both = [sgd, adamw]
    model(torch.ones(1, 2)).sum().backward()
    sgd.step()
    adamw.step()
    for optimizers in (both, tuple(both), dict.fromkeys(both)):
        info = read_optimizer(model, optimizers)
        assert info.chain == ("SGD + AdamW",)
        assert info.entries == 3
        assert info.foreign == 1
        rates = [group["lr"] for group in info.param_groups]
        assert rates == [0.5, 0.25]
        owners = {state.owner for state in info.states}
        assert owners == {"bias"}
    assert times_held(model, both) == {"weight": 1, "bias": 1}
    assert times_held(model, [*both, sgd]) == {"weight": 2, "bias": 1}


def times_held(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, int | None]:
    """Return how often optimizers have each parameter, by its name."""
    info = read_model(model, optimizers, None)
    return {parameter.name: parameter.held for parameter in info.parameters}


def test_several_schedulers_are_read_in_turn() -> None:
    first = Own(1)
    second = Own(2)
    expected = f"{read_scheduler(first)}; {read_scheduler(second)}"
    assert read_scheduler([first, second]) == expected
    assert read_scheduler([]) == read_scheduler(None) == ""


class Own:
    """A scheduler of a user, without ``get_last_lr`` and ``state_dict``."""

    def __init__(self, last_epoch: int) -> None:
        self.last_epoch = last_epoch


class NotYet(Own):
    """DeepSpeed's OneCycle has no learning rate before its first step."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def get_last_lr(self) -> list[float]:
        raise AssertionError("need to call step() first")


@pytest.mark.parametrize("kind", [Own, NotYet])
def test_a_scheduler_without_get_last_lr(kind: type[Own]) -> None:
    text = read_scheduler(kind(3))
    assert text.startswith("last_epoch=3 ")
    assert read_scheduler(kind(3)) == text
    assert read_scheduler(kind(4)) != text


def test_state_in_eight_bits() -> None:
    of_8_bits = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit

    def zeros(rows: int) -> Any:
        return of_8_bits.zeros((rows, 64), signed=True, block_size=256)

    zero = digest(zeros(64))
    changed = zeros(64)
    assert digest(changed) == zero
    changed.codes[0] = 3
    changed.scale[0] = 1.0
    assert digest(changed) != zero
    upper = zeros(32)
    lower = zeros(32)
    upper.copy_(torch.randn(32, 64))
    lower.copy_(torch.randn(32, 64))
    codes = torch.cat([upper.codes, lower.codes])
    scale = torch.cat([upper.scale, lower.scale])
    joined = of_8_bits(codes, scale, upper.qmap, True)
    start_of_lower = torch.tensor([2048])
    assert combine([digest(upper), digest(lower, start_of_lower)]) == digest(joined)
    # A code for each element, a scale for each block, and the 256 numbers that the codes stand for.
    assert stored_dtype(joined) == "uint8"
    bytes_stored = sum(part.nbytes for part in stored_parts(joined))
    assert bytes_stored == 4096 + 16 * 4 + 256 * 4


def test_a_quantized_parameter() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Linear(4, 4, bias=False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    before = read_unwrapped(model).parameters[0]
    live = read_model(model, None, None).parameters[0]
    assert before.dtype == "int8"
    assert live.dtype == "int8"
    assert before.digest == live.digest
    weight: Any = model.weight
    weight.qdata[0, 0] += 1
    assert read_unwrapped(model).parameters[0].digest != before.digest


@pytest.mark.parametrize(
    "step",
    [lambda optimizer, closure: optimizer.step(closure), lambda optimizer, closure: optimizer.step(closure=closure)],
    ids=["by place", "by name"],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_gradients_of_a_closure_are_those_of_the_step(
    step: Callable[[Any, Callable[[], Any]], Any], kind: Callable[..., torch.optim.Optimizer]
) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = kind(model.parameters(), lr=1e-3)
    observer = Observer()
    model.weight.grad = torch.full((1, 2), 100.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        torch.autograd.backward(loss)
        model.weight.grad = torch.tensor([[3.0, 4.0]])
        return float(loss.detach())

    with observer.watching():
        assert step(optimizer, closure) is not None
        assert squares(observer) == [25.0]
        optimizer.step(closure)
        assert squares(observer) == [25.0, 25.0]


def squares(observer: Observer) -> list[float]:
    return [step.square for step in observer.steps]


def test_a_failing_closure_raises_its_own_exception() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    observer = Observer()

    def closure() -> float:
        raise KeyError("of the trainer's own")

    with observer.watching(), pytest.raises(KeyError, match="of the trainer's own"):
        optimizer.step(closure)
    assert not observer.steps


class Delegates(torch.optim.Optimizer):
    """Steps through an inner optimizer on a part of its parameters, as torch's ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.optim = torch.optim.AdamW(parameters[:1])

    def step(self, closure: Any = None) -> Any:
        return self.optim.step(closure)


def test_a_step_within_a_step_is_one_step() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Delegates(list(model.parameters()))
    observer = Observer()
    model.weight.grad = torch.tensor([[3.0, 0.0]])
    model.bias.grad = torch.tensor([4.0])
    with observer.watching():
        optimizer.step()
        optimizer.step()
    assert len(observer.steps) == 2
    for step in observer.steps:
        assert step.optimizer == "Delegates"
        assert step.square == 25.0
        assert step.state == ("float32",)


def test_the_state_of_a_nested_optimizer_is_read() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Delegates(list(model.parameters()))
    model.weight.grad = torch.ones(1, 2)
    optimizer.step()
    # Loaded state is in the outer optimizer, None where another rank has it.
    optimizer.state[model.bias] = None
    info = read_optimizer(model, optimizer)
    assert info.chain == ("Delegates", "AdamW")
    assert info.entries == 2
    assert info.foreign == 0
    states = {(state.owner, state.key) for state in info.states}
    assert states == {("weight", "exp_avg"), ("weight", "exp_avg_sq"), ("weight", "step")}


def test_parameters_without_a_gradient_are_named() -> None:
    """A gradient of None, not of zero, in all steps since the last snapshot."""
    model = layers("used", "zero", "unused", "other")
    used: Any = model["used"].weight
    zero: Any = model["zero"].weight
    unused: Any = model["unused"].weight
    stale = torch.nn.Parameter(torch.zeros(1, 1))
    optimizer = torch.optim.AdamW([used, zero, unused, stale])
    observer = Observer()

    def names() -> tuple[str, ...]:
        return names_without_gradient(model, optimizer, observer)

    zero.grad = torch.zeros(1, 1)
    optimizer.step()
    assert names() == ()
    with observer.watching():
        optimizer.step()
        assert names() == ("unused.weight", "used.weight")
        used.grad = torch.ones(1, 1)
        optimizer.step()
        used.grad = None
        optimizer.step()
        assert names() == ("unused.weight",)
        observer.restart()
        assert names() == ()


def layers(*names: str) -> torch.nn.ModuleDict:
    """Return layers of one weight each."""
    return torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in names})


def names_without_gradient(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, observer: Observer
) -> tuple[str, ...]:
    info = read_optimizer(model, optimizer, without_gradient=observer.without_gradient())
    return info.without_gradient


def test_parameters_that_autograd_does_not_reach_are_named() -> None:
    """DeepSpeed's optimizers step on tensors of their own, which always have a gradient."""
    model = layers("used", "zero", "unused", "frozen")
    model["frozen"].requires_grad_(False)
    master = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([master])
    observer = Observer()
    copied = copy.deepcopy(model)
    observer.attach_to_layers(copied)

    def step(loss: torch.Tensor) -> tuple[str, ...]:
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        master.grad = torch.ones(3)
        optimizer.step()
        return names_without_gradient(copied, optimizer, observer)

    with observer.watching():
        x = torch.ones(1, 1)
        without_unused = copied["used"](x) + 0 * copied["zero"](x)
        assert step(without_unused) == ("unused.weight",)
        assert step(copied["unused"](x)) == ()
        observer.restart()
        assert step(copied["unused"](x)) == ("used.weight", "zero.weight")
    for parameter in copy.deepcopy(copied).parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_what_step_hooks_read_can_be_traced() -> None:
    """Dynamo traces the hooks of an optimizer whose step is compiled."""
    traced: Any = torch.compile(stored_dtype, backend="eager", dynamic=True)
    assert traced(torch.ones(3, 4)) == "float32"


class OffloadedZero3:
    """Stand-in for ZeRO-3's optimizer with its masters on the CPU of a machine with a GPU."""

    def __init__(self, model: torch.nn.Module) -> None:
        parameters = list(model.parameters())
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.fp32_partitioned_groups_flat = [flat.requires_grad_()]
        self.grad_position = {}
        start = 0
        for number, parameter in enumerate(parameters):
            self.grad_position[number] = [0, start, parameter.numel()]
            start += parameter.numel()
            parameter._z3_optimizer = self  # type: ignore[attr-defined]
            parameter.ds_id = number  # type: ignore[attr-defined]
            parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
            parameter.ds_tensor = parameter.detach().reshape(-1).bfloat16()  # type: ignore[attr-defined]
            parameter.ds_process_group = torch.distributed.group.WORLD  # type: ignore[attr-defined]

    def get_param_id(self, parameter: Any) -> int:
        return int(parameter.ds_id)

    def get_local_fp32_param(self, parameter: Any, _key: str | None = None) -> torch.Tensor:
        """Return a copy, as DeepSpeed returns one on the GPU."""
        group, start, length = self.grad_position[parameter.ds_id]
        masters = self.fp32_partitioned_groups_flat[group].detach()
        return masters[start : start + length].clone()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_gradients_of_masters_that_are_offloaded_are_read_where_they_are() -> None:
    pytest.importorskip("deepspeed")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    zero = OffloadedZero3(model)
    (flat,) = zero.fp32_partitioned_groups_flat
    flat.grad = torch.arange(1.0, 14.0)
    optimizer = SimpleNamespace(param_groups=[{"params": [flat]}])
    wrapper = SimpleNamespace(optimizer=optimizer)
    square, _, infos = read_gradients(model, wrapper, {flat: 0}, single=True)
    assert square == sum(number**2 for number in range(1, 14))
    numels = {info.name: info.numel for info in infos}
    assert numels == {"0.weight": 6, "0.bias": 3, "1.weight": 3, "1.bias": 1}
    square_by_name = {info.name: info.square for info in infos}
    assert square_by_name == {
        "0.weight": 91.0,
        "0.bias": 49.0 + 64 + 81,
        "1.weight": 100.0 + 121 + 144,
        "1.bias": 169.0,
    }

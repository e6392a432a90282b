"""Watches single steps through torch's public hooks: what computed, what was reduced, what the optimizer stepped on."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from pytest_distcompat.probe.blocks import multiplies
from pytest_distcompat.probe.closure import with_closure
from pytest_distcompat.probe.inputs import tensors_fed
from pytest_distcompat.probe.tensors import digest, dtype_name, local_of
from pytest_distcompat.trace import CollectiveInfo, ComputeInfo, StepInfo

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


#: (name of the place, function) -> the function as it is to be called there.
Guarded = Callable[[str, Callable[..., Any]], Callable[..., Any]]


def _as_it_is(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    del where
    return function


class Hook:
    """A hook on a module of somebody else's: in a copy of the module, or in a pickle of it, it is one that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """What the hook is for."""
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Who reads the pickle need not have this package."""
        return getattr, (contextlib.nullcontext(), "__exit__")


@dataclass
class _Step:
    """What is seen of a step while it goes on; ``optimizer`` is the ``id`` of the outermost one."""

    optimizer: int
    master: set[str] = field(default_factory=set)
    gradient: set[str] = field(default_factory=set)
    state: set[str] = field(default_factory=set)
    square: float = 0.0


class Observer:
    """Hooks that write down what steps do. Made once a run; ``watching()`` around a training says when, and how closely.

    The step hooks are torch's global ones (``register_optimizer_step_pre_hook``): they see the optimizer that really
    steps, at the time it steps, through any number of wrappers, and for ZeRO the flat partitions, which no param_group
    shows between steps.
    """

    def __init__(self, guarded: Guarded = _as_it_is) -> None:
        """Register the step hooks.

        Args:
            guarded: Wraps each function that torch calls. In somebody else's script it keeps what the probe raises
                from the script; in a run of ours that is a failure like any other.

        """
        self._guarded = guarded
        self.steps: list[StepInfo] = []
        self.compute: dict[tuple[str, str, str], ComputeInfo] = {}
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.sizes: dict[tuple[str, str], tuple[int, int]] = {}
        self.inputs: list[str] = []
        self.float8 = 0
        self._active = False
        self._mode: _Collectives | None = None
        self._below = 0
        self._step: _Step | None = None
        register_optimizer_step_pre_hook(guarded("before an optimizer's step, its gradients", self._pre_step))
        register_optimizer_step_post_hook(guarded("after an optimizer's step, its state", self._post_step))
        self.saw_operator = guarded("an operator", self._saw_operator)

    def attach(self, model: Module) -> None:
        """Watch all leaf modules that multiply by a matrix; before anything wraps the model.

        All, for a unit that was wrapped otherwise computes otherwise.
        """
        self.attach_to_products(model)
        model.register_forward_pre_hook(Hook(self.fed), with_kwargs=True)

    def attach_to_products(self, model: Module) -> list[RemovableHandle]:
        """The same without the model's inputs; what takes the hooks off again."""
        return [
            module.register_forward_hook(Hook(self._guarded("a forward hook of a layer", self._forward_hook(name))))
            for name, module in model.named_modules()
            if multiplies(module)
        ]

    def fed(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the model is fed, in no order of arguments: a wrapper may name what the caller did not. Empty without a tensor."""
        if torch.compiler.is_compiling():
            return  # a trainer that compiles though nobody asked for it
        if self._active and torch.is_grad_enabled():
            with self.aside():
                fed = tensors_fed((*args, *kwargs.values()))
                self.inputs.append(" ".join(sorted(digest(value) for value in fed)))

    def listen(self, *, on: bool) -> None:
        """Let the hooks write down what they see, or not, from now on; single operators in ``operators`` only."""
        self._active = on

    @contextlib.contextmanager
    def operators(self) -> Iterator[None]:
        """See single operators inside, where the hooks listen: for who wraps single calls of a training that is not his."""
        if not self._active:
            yield
            return
        with _Collectives(self):
            yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what happens inside; single operators where ``look_closely`` asks for them."""
        self._active, self._below = True, len(_get_current_dispatch_mode_stack())
        self._step = None
        try:
            yield
        finally:
            self._active = False
            self.look_closely(on=False)

    def look_closely(self, *, on: bool) -> None:
        """See single operators, or not, from now on. A tiny model's step takes four times as long meanwhile.

        Modes are left in the order in which they were entered, so ours goes below all that the trainer is in by now; and it
        stays while another lies over it. A mode is moved by two private functions, with which torch takes modes off and puts
        them back itself; ``tests/spawn/test_private_names.py`` says when they go away.
        """
        if on and self._mode is None:
            above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()[self._below :]]
            self._mode = _Collectives(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            for mode in reversed(above):
                _push_mode(mode)
        elif not on and self._mode is not None and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is computed inside is the probe's own, and no business of anybody's.

        ``_disable_current_modes`` is private, but torch's own kernels use it so; without it every operator of a digest goes
        through Python. ``tests/spawn/test_private_names.py`` says when it goes away.
        """
        with _disable_current_modes():
            yield

    def restart(self) -> None:
        """Forget what was seen: the next action begins."""
        self.steps.clear()
        self.compute.clear()
        self.collectives.clear()
        self.sizes.clear()
        self.inputs.clear()
        self.float8 = 0

    def infos(self) -> dict[str, Any]:
        """The keyword arguments of a Snapshot that come from here."""
        collectives = tuple(
            CollectiveInfo(op, dtype, calls, *self.sizes[op, dtype])
            for (op, dtype), calls in sorted(self.collectives.items())
        )
        return {
            "steps": tuple(self.steps),
            "compute": tuple(self.compute.values()),
            "collectives": collectives,
            "inputs": tuple(self.inputs),
            "float8": self.float8,
        }

    def _forward_hook(self, name: str) -> Any:
        def hook(module: Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self._active and inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
                weight = getattr(module, "weight", None)
                kept = dtype_name(weight.dtype) if isinstance(weight, torch.Tensor) else ""
                dtypes = (kept, dtype_name(inputs[0].dtype), dtype_name(output.dtype))
                # One module speaks for all that do the same; a trace is to stay readable.
                self.compute.setdefault(dtypes, ComputeInfo(name, *dtypes))

        return hook

    def _pre_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """What the optimizer steps on is there now, or when the closure that it was given has computed it.

        A step within a step is the same one: torch's ZeroRedundancyOptimizer has another step for it, on this rank's part.
        """
        if not self._active:
            return None
        if self._step is not None and self._step.optimizer != id(optimizer):
            return None
        step = self._step = _Step(id(optimizer))
        self._handed(optimizer, step)
        handed = self._guarded("the closure of an optimizer's step", self._handed)
        return with_closure(args, kwargs, functools.partial(handed, optimizer, step))

    def _handed(self, optimizer: Any, step: _Step) -> None:
        # Frozen parameters may have been handed over too: nobody updates them.
        tensors = [p for group in optimizer.param_groups for p in group["params"] if p.numel() and p.requires_grad]
        step.master = {dtype_name(p.dtype) for p in tensors}
        gradients = [local_of(p.grad) for p in tensors if p.grad is not None]
        step.gradient = {dtype_name(grad.dtype) for grad in gradients}
        with self.aside():
            step.square = sum(float(grad.double().square().sum()) for grad in gradients)

    def _post_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self._step
        if step is None:
            return
        step.state |= {
            dtype_name(value.dtype)
            for values in optimizer.state.values()
            if isinstance(values, Mapping)
            for key, value in values.items()
            # A number that is kept beside them (NAdam's ``mu_product``) is no state of the elements.
            if key != "step" and isinstance(value, torch.Tensor) and value.numel() and value.dim()
        }
        if step.optimizer == id(optimizer):
            self._step = None
            master, gradient, state = (tuple(sorted(found)) for found in (step.master, step.gradient, step.state))
            self.steps.append(StepInfo(type(optimizer).__name__, master, gradient, state, step.square))

    def _saw_operator(self, func: Any, args: Any, result: Any) -> None:
        """Write down a collective, and a tensor in 8 bits that was made, not passed on: a view is another operator's result."""
        if func.namespace in {"c10d", "_c10d_functional"}:
            self._saw(func._schema.name.split("::")[1].strip("_"), _tensors(args))  # noqa: SLF001 - no public way to an operator's name
        self.float8 += _in_8_bits(result) and not any(map(_in_8_bits, args))

    def _saw(self, op: str, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            key = (op, dtype_name(tensor.dtype))
            self.collectives[key] += 1
            most, total = self.sizes.get(key, (0, 0))
            self.sizes[key] = (max(most, tensor.numel()), total + tensor.numel())


#: What matrix products in 8 bits take their factors in.
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """Sees every c10d operator that this thread dispatches, from Python or from DDP's reducer in C++, and casts to 8 bits.

    The mechanism of torch's own CommDebugMode, which counts them but does not tell dtypes.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode torch.compile quietly runs the model uncompiled."""
        return True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._observer.saw_operator(func, args, result)
        return result


def _in_8_bits(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in FLOAT8


def _tensors(args: Any) -> list[torch.Tensor]:
    """Input tensors of a c10d operator: the last of its tensor arguments (outputs come first)."""
    found: list[list[torch.Tensor]] = []
    for argument in args:
        if isinstance(argument, torch.Tensor):
            found.append([argument])
        elif isinstance(argument, (list, tuple)):
            flat = [x for x in argument if isinstance(x, torch.Tensor)]
            if flat:
                found.append(flat)
    return found[-1] if found else []

"""Observer of single steps of a training, through torch's public hooks and a dispatch mode.

- Forward hooks on modules: the model's inputs, the dtypes that layers compute in, what dropouts drop, recomputed blocks.
- Hooks on gradients: which parameters autograd reaches, and how much each token counts in the loss.
- Global hooks before and after each optimizer step: the dtypes and gradients that the optimizer really steps on.
- The dispatch mode, which sees every operator: collectives, casts to 8 bits, matrix products that are computed again.

After each action of the trainer ``infos`` returns what was recorded, and ``restart`` forgets it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.weak import WeakIdKeyDictionary

from pytest_distcompat.probe.blocks import is_a, multiplies
from pytest_distcompat.probe.layouts import secondary_ranks
from pytest_distcompat.probe.optimizer import numbers_of, read_gradients
from pytest_distcompat.probe.tensors import digest, dtype_name, local_of, stored_dtype, valueless
from pytest_distcompat.probe.weights import logits_of, read_weights
from pytest_distcompat.trace import (
    WITHOUT_GRADIENT,
    CollectiveInfo,
    DropoutInfo,
    StepInfo,
    TokenWeights,
)

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


#: Name, dtype and ranks of a collective.
_Kind = tuple[str, str, tuple[int, ...]]
#: (description of the call, function) -> the function that is called instead.
Guarded = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class Hook:
    """Hook on a user's module that becomes a hook without effect in a copy or a pickle of the module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a function of the standard library, so that the reader of the pickle does not need this package."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class Observer:
    """Hooks that record what steps do, inside ``watching()``. Make one for each run.

    torch's global step hooks see the optimizer that really steps, through any number of wrappers, and ZeRO's flat
    partitions, which no param_group has between steps.
    """

    def __init__(self, guarded: Guarded = lambda _where, function: function) -> None:
        """Register the step hooks; ``guarded`` wraps each function that torch calls, to keep exceptions away from a script."""
        self._guarded = guarded
        # What was recorded since the last restart.
        self.steps: list[StepInfo] = []
        #: The dtypes that layers which multiply by a matrix gave out.
        self.compute: set[str] = set()
        #: The sizes of the tensors of each kind of collective.
        self.collectives: dict[_Kind, list[int]] = defaultdict(list)
        #: The digests of the model's inputs in each of its forwards.
        self.inputs: list[str] = []
        #: The names of modules in evaluation mode in a forward whose gradients are wanted.
        self.evaluating: set[str] = set()
        self.dropouts: list[DropoutInfo] = []
        self.token_weights: list[TokenWeights] = []
        #: How many times a tensor was cast to 8 bits.
        self.float8 = 0
        #: How many operators blocks have computed in the model's forward and again after it, by kind.
        self.recomputed: Counter[str] = Counter()
        #: Whether the model's own forward is going on; what blocks compute outside of it is computed again.
        self._forward = False
        #: How many forwards are going on of blocks and of modules in them, one inside the other.
        self._depth = 0
        #: Returns the trainer's model and optimizer, and whether gradients are recorded one by one too; None for no model.
        self.trainer: Callable[[], tuple[Module | None, Any, bool]] = lambda: (None, None, False)
        #: Whether hooks record. Operators are recorded in ``watching`` and ``recording_operators`` only.
        self.active = False
        #: The dispatch mode while ``watching`` records operators, and how many modes of others were active when that began.
        self._mode: _OperatorMode | None = None
        self._outer_modes = 0
        #: The ``id`` of the outermost optimizer that is stepping; 0 for none.
        self._stepping = 0
        #: What it steps on, from before its step.
        self._step: StepInfo | None = None
        #: The dtypes of its state, from after its step and after those inside it.
        self._state: set[str] = set()
        #: Tensor that an optimizer holds -> whether it had a gradient in any step.
        self._stepped: Any = WeakIdKeyDictionary()
        #: Trainable parameter of the model -> whether autograd computed a gradient for it since the last restart.
        self._reached: Any = WeakIdKeyDictionary()
        #: The modules of the model to which hooks are attached.
        self._attached: Any = WeakIdKeyDictionary()
        register_optimizer_step_pre_hook(
            guarded("before an optimizer's step, its gradients", self._pre_step)
        )
        register_optimizer_step_post_hook(
            guarded("after an optimizer's step, its state", self._post_step)
        )
        self.record_operator = guarded("an operator", self._record_operator)

    def attach(self, model: Module) -> None:
        """Register hooks on the model, its trainable parameters and its leaf layers, before anything wraps it."""
        self._attached.update(dict.fromkeys(model.modules()))
        self.attach_to_layers(model)
        model.register_forward_pre_hook(Hook(self.record_inputs), with_kwargs=True)
        model.register_forward_hook(
            Hook(self._guarded("what a model returned", self._await_gradient))
        )

    def attach_to_built(self, model: Module) -> None:
        """Register hooks on layers that a trainer has put in the place of the given ones.

        DeepSpeed's AutoTP replaces single layers. torchtitan's Trainer builds the whole model from its configuration.
        """
        if not any(module in self._attached for module in model.modules()):
            self.attach(model)
        for module in model.modules():
            if is_a(module, "TensorParallel_Layer"):
                module.register_forward_hook(self._forward_hook())

    def attach_to_layers(self, model: Module) -> list[RemovableHandle]:
        """Register hooks on trainable parameters and on leaf modules that multiply by a matrix; return handles of the hooks."""
        reach = Hook(self._guarded("the gradient of a parameter", self._record_reached))
        handles: list[RemovableHandle] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._reached[parameter] = False
                handles.append(parameter.register_post_accumulate_grad_hook(reach))  # type: ignore[no-untyped-call]  # torch
        for name, module in model.named_modules():
            if multiplies(module):
                handles.append(module.register_forward_hook(self._forward_hook()))
            if isinstance(module, DROPOUTS):
                handles.append(module.register_forward_hook(self._dropout_hook(name)))
        return handles

    def attach_to_blocks(self, model: Module, names: Iterable[str]) -> None:
        """Register hooks that tell what blocks compute in the model's forward from what they compute again after it."""

        def setting_forward(on: bool) -> Hook:
            return Hook(lambda *_: setattr(self, "_forward", on))

        def changing_depth(by: int) -> Hook:
            return Hook(lambda *_: setattr(self, "_depth", self._depth + by))

        def count_call(*_: Any) -> None:
            self.recomputed["calls"] += self._forward

        model.register_forward_pre_hook(setting_forward(True))
        model.register_forward_hook(setting_forward(False), always_call=True)
        for name in names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(Hook(count_call))
            # What is in a block too: transformers recomputes a block's ``forward``, without its hooks.
            for module in block.modules():
                module.register_forward_pre_hook(changing_depth(1))
                # Always: torch leaves a recomputed forward by an exception, as soon as it has all that it needs.
                module.register_forward_hook(changing_depth(-1), always_call=True)

    def _record_reached(self, parameter: torch.Tensor) -> None:
        self._reached[parameter] = True

    def record_inputs(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the digests of the model's input tensors, sorted, and which modules are in evaluation mode."""
        if torch.compiler.is_compiling():
            return  # a trainer may compile without being asked to
        if self.active and torch.is_grad_enabled():
            with self.aside():
                # A wrapper may pass by keyword what it got by position.
                self.inputs.append(digest_of_inputs((*args, *kwargs.values())))
            for name, part in module.named_modules():
                if not part.training:
                    self.evaluating.add(name)

    def _await_gradient(self, _module: Module, _inputs: Any, output: Any) -> None:
        """Have the weights of tokens recorded once the gradient of the model's logits is there, in the first steps."""
        if torch.compiler.is_compiling() or not (
            self.active and torch.is_grad_enabled() and self.trainer()[2]
        ):
            return
        logits = logits_of(output)
        if logits is None or valueless(logits):
            return
        values = logits.detach()

        def record(gradient: torch.Tensor | None) -> None:
            # None where the loss was made of other logits: accelerate returns a copy in float32, DDP passes that on.
            if gradient is not None:
                with self.aside():
                    self.token_weights.append(read_weights(values, gradient))

        logits.register_hook(self._guarded("the gradient of logits", record))  # type: ignore[no-untyped-call]  # torch

    @contextlib.contextmanager
    def recording_operators(self) -> Iterator[None]:
        """Record the operators inside, if the hooks are active. For a single call of a user's script."""
        if not self.active:
            yield
            return
        with _OperatorMode(self):
            yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the training inside; its operators only while ``record_operators`` has turned that on."""
        self.active = True
        self._outer_modes = len(_get_current_dispatch_mode_stack())
        self._stepping = 0
        try:
            with self._recording_lost_gradients():
                yield
        finally:
            self.active = False
            self.record_operators(on=False)

    @contextlib.contextmanager
    def _recording_lost_gradients(self) -> Iterator[None]:
        """Count blocks that are recomputed re-entrantly, and none of whose inputs requires a gradient.

        Parameters inside then get none, and torch only warns: https://docs.pytorch.org/docs/stable/checkpoint.html
        """
        # A rank that recomputes nothing has not imported it.
        checkpoint: Any = sys.modules.get("torch.utils.checkpoint")
        if checkpoint is None:
            yield
            return
        check_by_torch = checkpoint.check_backward_validity

        def check(inputs: Iterable[Any]) -> None:
            tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
            if not any(tensor.requires_grad for tensor in tensors):
                self.recomputed[WITHOUT_GRADIENT] += 1
            check_by_torch(tensors)

        checkpoint.check_backward_validity = check
        try:
            yield
        finally:
            checkpoint.check_backward_validity = check_by_torch

    def record_operators(self, *, on: bool) -> None:
        """Turn the recording of single operators on or off: while on, a tiny model's step takes four times as long."""
        # Our dispatch mode goes below those of the trainer, which can then leave its own, and is removed only when none
        # lies above it. The two functions that move modes are private; ``tests/launch/test_private_names.py`` fails when
        # they change.
        if on and self._mode is None:
            above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()[self._outer_modes :]]
            self._mode = _OperatorMode(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            for mode in reversed(above):
                _push_mode(mode)
        elif not on and self._mode is not None and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Disable dispatch modes inside: operators there belong to the probe, and must not all go through Python."""
        # ``_disable_current_modes`` is private; ``tests/launch/test_private_names.py`` fails when it changes.
        with _disable_current_modes():
            yield

    def restart(self) -> None:
        """Forget everything recorded, for the next action."""
        self.steps.clear()
        self._stepped.clear()
        self.compute.clear()
        self.collectives.clear()
        self.inputs.clear()
        self.evaluating.clear()
        self.dropouts.clear()
        self.token_weights.clear()
        self._reached.update(dict.fromkeys(self._reached, False))
        self.float8 = 0
        self.recomputed.clear()

    def without_gradient(self) -> frozenset[int]:
        """Return the ``id`` of each tensor that optimizers stepped on, and always without a gradient."""
        if not self._stepped:
            return frozenset()
        without: set[int] = set()
        for tensor, had_gradient in self._stepped.items():
            if not had_gradient:
                without.add(id(tensor))
        # DeepSpeed's step on flat partitions, which always have one: there the parameters count that autograd did not reach.
        for parameter, reached in self._reached.items():
            if not reached and parameter not in self._stepped:
                without.add(id(parameter))
        return frozenset(without)

    def infos(self) -> dict[str, Any]:
        """Return the fields of a Snapshot that were recorded here."""
        collectives: list[CollectiveInfo] = []
        for (op, dtype, ranks), sizes in sorted(self.collectives.items()):
            collectives.append(CollectiveInfo(op, dtype, len(sizes), max(sizes), sum(sizes), ranks))
        return {
            "steps": tuple(self.steps),
            "compute": tuple(sorted(self.compute)),
            "collectives": tuple(collectives),
            "inputs": tuple(self.inputs),
            "evaluating": tuple(sorted(self.evaluating)),
            "dropouts": tuple(self.dropouts),
            "token_weights": tuple(self.token_weights),
            "float8": self.float8,
            "recomputed": dict(self.recomputed),
        }

    def _forward_hook(self) -> Hook:
        def hook(_module: Module, inputs: tuple[Any, ...], output: Any) -> None:
            if (
                self.active
                and inputs
                and isinstance(inputs[0], torch.Tensor)
                and isinstance(output, torch.Tensor)
            ):
                self.compute.add(dtype_name(output.dtype))

        return Hook(self._guarded("a forward hook of a layer", hook))

    def _dropout_hook(self, name: str) -> Hook:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling() or not (
                self.active and module.training and torch.is_grad_enabled()
            ):
                return
            with self.aside():
                info = read_dropout(name, module.p, inputs[0], output)
                if info is not None:
                    self.dropouts.append(info)

        return Hook(self._guarded("a forward hook of a dropout", hook))

    def _pre_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record what the optimizer steps on; return the arguments with a closure wrapped, to record again after it."""
        # A step inside a step belongs to the outer one: ZeroRedundancyOptimizer lets another optimizer step on this
        # rank's part.
        if not self.active or self._stepping not in {0, id(optimizer)}:
            return None
        self._stepping = id(optimizer)
        self._state = set()
        self._record_gradients(optimizer)
        record = self._guarded("the closure of an optimizer's step", self._record_gradients)
        return with_closure(args, kwargs, functools.partial(record, optimizer))

    def _record_gradients(self, optimizer: Any) -> None:
        """Record the gradients that the optimizer is about to step on, and what it updates."""
        group_by_tensor: dict[torch.Tensor, int] = {}
        gradients: list[torch.Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                # The optimizer may hold frozen parameters too, which it does not update.
                if not tensor.numel() or not tensor.requires_grad:
                    continue
                group_by_tensor[tensor] = number
                self._stepped[tensor] = self._stepped.get(tensor, False) or tensor.grad is not None
        for tensor in group_by_tensor:
            if tensor.grad is not None:
                gradients.append(local_of(tensor.grad))
        with self.aside():
            model, trainers_optimizer, single = self.trainer()
            square, holders, singles = read_gradients(
                model, trainers_optimizer, group_by_tensor, single=single
            )
            self._step = StepInfo(
                optimizer=type(optimizer).__name__,
                master=_dtypes_of(group_by_tensor),
                gradient=_dtypes_of(gradients),
                state=(),
                square=square,
                gradients=singles,
                holders=holders,
                secondary=secondary_ranks(model),
                param_groups=tuple(numbers_of(group) for group in optimizer.param_groups),
            )

    def _post_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            return
        for values in optimizer.state.values():
            if not isinstance(values, Mapping):
                continue
            for key, value in values.items():
                # A scalar beside them (NAdam's ``mu_product``) is no state of the elements.
                if (
                    key != "step"
                    and isinstance(value, torch.Tensor)
                    and value.numel()
                    and value.dim()
                ):
                    self._state.add(stored_dtype(value))
        if self._stepping == id(optimizer) and self._step is not None:
            self.steps.append(dataclasses.replace(self._step, state=tuple(sorted(self._state))))
            self._stepping = 0

    def _record_operator(self, func: Any, args: Any, result: Any) -> None:
        """Record what an operator is: a collective, a cast to 8 bits, or a part of a block's forward."""
        if func.namespace in {"c10d", "_c10d_functional"}:
            self._record_collective(func, args)
        # A view in 8 bits has an input in 8 bits, a cast has none.
        if _in_8_bits(result) and not any(map(_in_8_bits, args)):
            self.float8 += 1
        if self._depth:
            kind = "products" if _MULTIPLIES.search(func._schema.name) else "others"  # noqa: SLF001 - an operator's name is not public
            if not self._forward:
                kind = f"{kind} again"
            self.recomputed[kind] += 1

    def _record_collective(self, func: Any, args: Any) -> None:
        """Record the sizes of a collective's tensors by its name, dtype and ranks."""
        name = func._schema.name.split("::")[1].strip("_")  # noqa: SLF001 - an operator's name is not public
        ranks = group_ranks(func, args)
        for tensor in _tensors(args):
            self.collectives[name, dtype_name(tensor.dtype), ranks].append(tensor.numel())


def _dtypes_of(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the tensors' dtypes, sorted."""
    return tuple(sorted({dtype_name(tensor.dtype) for tensor in tensors}))


#: Modules that drop single activations, with the probability ``p``.
DROPOUTS = (torch.nn.Dropout,)
#: A dropout counts if two modules that draw by themselves would drop the same with a probability of at most 2 ** -CHANCE.
CHANCE = 30


def read_dropout(name: str, p: float, given: Any, output: Any) -> DropoutInfo | None:
    """Return what a module dropped; None if others that draw by themselves might drop the same by chance."""
    if not 0 < p < 1 or valueless(given):
        return None
    given = local_of(given).detach()
    output = local_of(output).detach()
    # Where the input is zero, nothing tells whether the module has dropped it.
    visible = given != 0
    # The probability that two draws agree on one element.
    agreement = p * p + (1 - p) ** 2
    if int(visible.sum()) * -math.log2(agreement) < CHANCE:
        return None
    return DropoutInfo(name, digest(given), digest((output == 0) & visible))


def digest_of_inputs(values: Any) -> str:
    """Return the digests of the tensors among some values, sorted."""
    return " ".join(sorted(map(digest, tensors_fed(values))))


#: The dtypes of the factors of matrix products in 8 bits.
FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


#: Operators that multiply matrices, attention's among them.
_MULTIPLIES = re.compile(r"::(mm|addmm|bmm|baddbmm|_scaled_mm|_scaled_dot_product_\w+)$")


class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """Dispatch mode that sees every c10d operator of this thread, DDP's reducer in C++ included, and casts to 8 bits.

    torch's own CommDebugMode works in the same way, but it counts operators without their dtypes.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: under a mode that says False, torch.compile silently runs the model uncompiled."""
        return True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._observer.record_operator(func, args, result)
        return result


def _in_8_bits(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in FLOAT8


def group_ranks(func: Any, args: Any) -> tuple[int, ...]:
    """Return the ranks of the process group that a c10d operator is called with; empty for one that has none."""
    # Functional collectives may have the group's name, which only a private function resolves; the schema of an operator is
    # private too. ``tests/launch/test_private_names.py`` fails when they change.
    from torch.distributed import ProcessGroup, distributed_c10d, get_process_group_ranks

    group: Any = None
    for argument, value in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001 - see above
        if argument.name in {"process_group", "group_name"}:
            group = value
            break
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]  # noqa: SLF001 - see above
    elif group is not None and not isinstance(group, ProcessGroup):
        group = ProcessGroup.unbox(group)
    if group is None:
        return ()
    return tuple(get_process_group_ranks(group))


def _tensors(args: Any) -> list[torch.Tensor]:
    """Return the input tensors of a c10d operator: the last of its tensor arguments (outputs come first)."""
    for argument in reversed(args):
        values = argument if isinstance(argument, (list, tuple)) else [argument]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if tensors:
            return tensors
    return []


def with_closure(args: Any, kwargs: Any, then: Callable[[], None]) -> tuple[Any, Any] | None:
    """Return the arguments of ``step(closure)`` with ``then`` called after the closure; None for a step without one."""
    # https://docs.pytorch.org/docs/stable/optim.html (optimizer.step(closure)). Lightning's Trainer takes every step like
    # this.
    closure = kwargs.get("closure")
    if not closure and len(args) > 1:
        closure = args[1]
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def wrapped(*closure_args: Any, **closure_kwargs: Any) -> Any:
        result = closure(*closure_args, **closure_kwargs)
        then()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


#: How many levels of containers below an argument are searched for tensors.
DEPTH = 6


def tensors_fed(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors with at least one dimension in mappings, sequences and dataclasses."""
    # If there are none, attributes of other objects are searched too: the batches of torch_geometric keep their tensors there.
    values = list(arguments)
    return list(_tensors_in(values, attributes=False)) or list(_tensors_in(values, attributes=True))


def _tensors_in(values: Iterable[Any], *, attributes: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors with at least one dimension, level by level; each object is visited once."""
    visited: set[int] = set()
    level = list(values)
    for _ in range(DEPTH):
        next_level: list[Any] = []
        for value in level:
            if id(value) in visited:
                continue
            visited.add(id(value))
            if not isinstance(value, torch.Tensor):
                next_level += _children(value, attributes=attributes)
            elif value.dim():
                yield value
        level = next_level


def _children(value: Any, *, attributes: bool) -> list[Any]:
    """Return the values that a container, or with ``attributes`` any object, holds directly."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if attributes and not isinstance(value, (type, torch.nn.Module)):
        return list(getattr(value, "__dict__", {}).values())
    return []

"""Observer of the steps of a training, through torch's hooks and a dispatch mode.

Some facts cannot be read from a model after a step: the dtypes of its matrix products, the
collectives that were sent, the gradients that the optimizer got. The ``Observer`` records them
while the trainer runs. ``worker`` makes one on each rank of a suite, calls ``attach`` with the
model before anything wraps that, and lets the trainer run inside ``watching()``. ``ext.scripts``
makes one in each rank of a user's script, and calls ``attach_to_layers`` once the model is wrapped.
An action is one unit of a rank's work: ``build``, ``step``, ``save``. After each action of the
trainer both put what ``infos`` returns into the snapshot, and call ``restart``.

How it records:

- Forward hooks on modules record the model's inputs, the dtypes in which layers compute, what
  dropouts drop, and which blocks are recomputed.
- Hooks on gradients record which parameters autograd reaches, and the weight of each token in the
  loss.
- Global hooks before and after each optimizer step record what the optimizer really steps on.
- The dispatch mode, torch's way to see every operator before it runs, records collectives, casts
  to float8, and matrix products of recomputed blocks. It is slow, so it is on in single steps only.

A *block* is one of the equal modules of a model, ``layers.0``. It is *recomputed* if activation
checkpointing runs its forward pass a second time, in the backward pass, in place of keeping its
activations. Hooks that read values leave at once while torch.compile traces them
(``torch.compiler.is_compiling``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
from pytest_distcompat.probe.deepspeed_shards import secondary_ranks
from pytest_distcompat.probe.dropouts import DROPOUTS, read_dropout
from pytest_distcompat.probe.gradients import read_gradients
from pytest_distcompat.probe.inputs import digest_of_inputs
from pytest_distcompat.probe.operators import MULTIPLIES, group_ranks, is_float8, sent_tensors
from pytest_distcompat.probe.states import numbers_of
from pytest_distcompat.probe.tensors import dtype_name, local_of, stored_dtype, valueless
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


class _CollectiveKind(NamedTuple):
    """What collectives have in common that are counted together.

    Attributes:
        op: The name of the operator, without namespace: ``allreduce``.
        dtype: The dtype of the tensors that are sent: ``float32``.
        ranks: The ranks of the process group.
    """

    op: str
    dtype: str
    ranks: tuple[int, ...]


#: A function that torch calls.
_Call = Callable[..., Any]
#: Wraps such a function so that its exceptions stay away from a user's script. The arguments are a
#: description of the call, such as "a forward hook of a layer", and the function.
Guarded = Callable[[str, _Call], _Call]
#: The positional and the keyword arguments of an optimizer's step.
_StepArguments = tuple[Any, Any]
#: The trainer's model, or None; its optimizer, with all wrappers that the trainer has put around
#: it; and whether to record the gradients of single parameters in the next step, which is done in
#: the first steps only.
_Trainer = tuple["Module | None", Any, bool]


class Hook:
    """A hook on a user's module. In a copy or pickle of the module it has no effect.

    A trainer may copy the model (an average of the weights) or pickle it as a whole. The copy's
    forward passes are not those of the training.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a function of the standard library that does nothing.

        So the pickle can be read where this package is not installed.
        """
        # It is unpickled by ``getattr(nullcontext(), "__exit__")``: a method that takes any
        # arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


class Observer:
    """Records what the steps of one run do, inside ``watching()``.

    torch's global step hooks see the optimizer that really steps, inside any number of wrappers.
    They also see ZeRO's flat partitions, which are in its param_groups only during a step.
    """

    def __init__(self, guarded: Guarded = lambda _where, function: function) -> None:
        """Register the step hooks.

        Args:
            guarded: Wraps the functions that torch calls in a user's script, to keep exceptions of
                the observer away from it. Hooks that only suites have need not be wrapped.
        """
        self._guarded = guarded

        # What was recorded since the last restart.
        #: Each step of a torch optimizer.
        self.steps: list[StepInfo] = []
        #: The dtypes of the outputs of layers that multiply by a matrix.
        self.compute: set[str] = set()
        #: The number of elements of each tensor, by kind of collective.
        self.collectives: dict[_CollectiveKind, list[int]] = defaultdict(list)
        #: The digests of the model's inputs, one text for each forward.
        self.inputs: list[str] = []
        #: The names of modules that were in evaluation mode in a forward with gradients.
        self.evaluating: set[str] = set()
        #: What each forward pass of a dropout dropped.
        self.dropouts: list[DropoutInfo] = []
        #: The weight of each token in the loss, one record for each micro-batch.
        self.token_weights: list[TokenWeights] = []
        #: How many times a tensor was cast to float8.
        self.float8 = 0
        #: The number of operators in blocks, by kind: in the model's forward, and recomputed after
        #: it: ``{"products": 14, "products again": 14, "others": 90, "calls": 2}``.
        self.recomputed: Counter[str] = Counter()
        #: Trainable parameter of the model -> whether autograd computed a gradient for it.
        self._reached: Any = WeakIdKeyDictionary()
        #: Tensor of an optimizer -> whether it had a gradient in any step.
        self._stepped: Any = WeakIdKeyDictionary()

        # Where the training is.
        #: Whether hooks record. Operators are recorded in ``watching`` and ``recording_operators``
        #: only.
        self.active = False
        #: Whether the model's own forward is running. What blocks compute outside of it is
        #: recomputed.
        self._forward = False
        #: How many forwards of blocks, and of modules in blocks, are running inside one another.
        self._depth = 0
        #: The ``id`` of the outermost optimizer that is stepping; 0 for none.
        self._stepping = 0
        #: What this optimizer steps on, read before its step.
        self._step: StepInfo | None = None
        #: The dtypes of this optimizer's state, read after its step and after steps inside it.
        self._state: set[str] = set()

        #: Returns the trainer whose steps are recorded. The owner of the observer sets it.
        self.trainer: Callable[[], _Trainer] = _no_trainer
        #: The modules of the model that have hooks.
        self._attached: Any = WeakIdKeyDictionary()
        #: The dispatch mode while ``watching`` records operators.
        self._mode: _OperatorMode | None = None
        #: The number of dispatch modes that were active when ``watching`` began.
        self._outer_modes = 0
        register_optimizer_step_pre_hook(
            guarded("before an optimizer's step, its gradients", self._pre_step)
        )
        register_optimizer_step_post_hook(
            guarded("after an optimizer's step, its state", self._post_step)
        )
        self.record_operator = guarded("an operator", self._record_operator)

    def attach(self, model: Module) -> None:
        """Register hooks on the model, its parameters and its layers, before anything wraps it.

        Wrappers keep the hooks: they call the same modules, under other names.
        """
        self._attached.update(dict.fromkeys(model.modules()))
        self.attach_to_layers(model)
        # Not guarded: only suites register it. In a user's script a guarded hook of ``ext.scripts``
        # calls the method.
        for name, network in _networks(model):
            record = functools.partial(self.record_inputs, name=name)
            network.register_forward_pre_hook(Hook(record), with_kwargs=True)
        model.register_forward_hook(
            Hook(self._guarded("what a model returned", self._await_gradient))
        )

    def attach_to_built(self, model: Module) -> None:
        """Register hooks on layers with which a trainer has replaced those of the given model.

        DeepSpeed's AutoTP replaces single layers. torchtitan's Trainer builds a model of its own.
        """
        if not any(module in self._attached for module in model.modules()):
            self.attach(model)
        for module in model.modules():
            if is_a(module, "TensorParallel_Layer"):
                module.register_forward_hook(self._forward_hook())

    def attach_to_layers(self, model: Module) -> list[RemovableHandle]:
        """Register hooks on trainable parameters, and on layers that multiply by a matrix or drop.

        Returns:
            Handles that remove the hooks.
        """
        reach = Hook(self._guarded("the gradient of a parameter", self._record_reached))
        handles: list[RemovableHandle] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._reached[parameter] = False
                # torch leaves the method untyped.
                handle = parameter.register_post_accumulate_grad_hook(reach)  # type: ignore[no-untyped-call]
                handles.append(handle)
        for name, module in model.named_modules():
            if multiplies(module):
                handles.append(module.register_forward_hook(self._forward_hook()))
            if isinstance(module, DROPOUTS):
                handles.append(module.register_forward_hook(self._dropout_hook(name)))
        return handles

    def attach_to_blocks(self, model: Module, names: Iterable[str]) -> None:
        """Register hooks that tell a block's forward in the model's from a recomputed one."""

        # A block that computes (``_depth`` > 0) while the model's own forward does not run
        # (``_forward`` is False) is being recomputed, in the backward pass.
        def begin_forward(*_: Any) -> None:
            self._forward = True

        def end_forward(*_: Any) -> None:
            self._forward = False

        def enter_module(*_: Any) -> None:
            self._depth += 1

        def leave_module(*_: Any) -> None:
            self._depth -= 1

        def count_call(*_: Any) -> None:
            # True counts as 1, so only calls in the model's own forward count.
            self.recomputed["calls"] += self._forward

        model.register_forward_pre_hook(Hook(begin_forward))
        model.register_forward_hook(Hook(end_forward), always_call=True)
        for name in names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(Hook(count_call))
            # On the modules in a block too, because transformers recomputes the method ``forward``
            # of a block, which does not call the block's own hooks.
            for module in block.modules():
                module.register_forward_pre_hook(Hook(enter_module))
                # ``always_call``, because torch leaves a recomputed forward by an exception as soon
                # as it has all tensors that it needs.
                module.register_forward_hook(Hook(leave_module), always_call=True)

    def _record_reached(self, parameter: torch.Tensor) -> None:
        self._reached[parameter] = True

    def record_inputs(
        self,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "",
    ) -> None:
        """Record the digests of the model's inputs, and which modules are in evaluation mode.

        Args:
            module: The model, or one of its networks.
            args: The positional arguments of its forward.
            kwargs: The keyword arguments.
            name: Its name in the model; empty for the model itself.
        """
        # A trainer may compile although the cell does not say so.
        if torch.compiler.is_compiling():
            return
        # An evaluation between two steps runs without gradients: it is no training.
        if not self.active or not torch.is_grad_enabled():
            return
        # A wrapper may pass positional arguments on by keyword.
        values = (*args, *kwargs.values())
        with self.aside():
            self.inputs.append(digest_of_inputs(values))
        for part_name, part in module.named_modules(prefix=name):
            if not part.training:
                self.evaluating.add(part_name)

    def _await_gradient(self, _module: Module, _inputs: Any, output: Any) -> None:
        """Record the weights of tokens once the gradient of the model's logits is computed.

        It is a forward hook of the model. There the gradient does not exist yet, so the hook
        registers another one on the logits, which autograd calls in the backward pass.
        """
        if torch.compiler.is_compiling() or not self.active or not torch.is_grad_enabled():
            return
        _model, _optimizer, records_gradients = self.trainer()
        if not records_gradients:
            return
        logits = logits_of(output)
        # Tensors on the meta device and fake ones have no values to read.
        if logits is None or valueless(logits):
            return
        values = logits.detach()

        def record(gradient: torch.Tensor | None) -> None:
            # None if the loss was computed from a copy of the logits, such as accelerate's in
            # float32.
            if gradient is not None:
                with self.aside():
                    self.token_weights.append(read_weights(values, gradient))

        # torch leaves the method untyped.
        logits.register_hook(self._guarded("the gradient of logits", record))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def recording_operators(self) -> Iterator[None]:
        """Record the operators inside the block, which is a single call of a user's script."""
        if not self.active:
            yield
            return
        with _OperatorMode(self):
            yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the training inside the block; operators only while ``record_operators`` is on."""
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
        """Count re-entrant checkpoints none of whose inputs requires a gradient.

        The parameters inside get no gradient then, and torch only warns:
        https://docs.pytorch.org/docs/stable/checkpoint.html.
        """
        # A rank that recomputes nothing has not imported the module.
        checkpoint: Any = sys.modules.get("torch.utils.checkpoint")
        if checkpoint is None:
            yield
            return
        check_by_torch = checkpoint.check_backward_validity

        # torch calls it with the inputs of each re-entrant checkpoint.
        def check(inputs: Iterable[Any]) -> None:
            tensors: list[torch.Tensor] = []
            requires_grad = False
            for value in inputs:
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                    requires_grad = requires_grad or value.requires_grad
            if not requires_grad:
                self.recomputed[WITHOUT_GRADIENT] += 1
            check_by_torch(tensors)

        checkpoint.check_backward_validity = check
        try:
            yield
        finally:
            checkpoint.check_backward_validity = check_by_torch

    def record_operators(self, *, on: bool) -> None:
        """Turn the recording of operators on or off, between two actions of the trainer.

        While it is on, a tiny model's step takes four times as long.
        """
        if on and self._mode is None:
            self._enter_mode()
        elif not on and self._mode is not None and _get_current_dispatch_mode() is self._mode:
            # A mode can be left only while it is the innermost one. If the trainer has entered
            # another inside it, ours stays on until a later call, after the trainer has left its
            # own.
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    def _enter_mode(self) -> None:
        """Enter our dispatch mode outside those that the trainer has entered in ``watching``.

        So the trainer can leave its own modes, which are a stack, while ours stays.
        """
        # The functions that move modes are private; ``tests/launch/test_private_names.py`` fails
        # when they change.
        trainer_modes: list[Any] = []
        while len(_get_current_dispatch_mode_stack()) > self._outer_modes:
            trainer_modes.append(_pop_mode())
        self._mode = _OperatorMode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        for mode in reversed(trainer_modes):
            _push_mode(mode)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Disable dispatch modes inside the block, whose operators are the probe's own.

        Otherwise the observer would record what the probe computes, such as digests, as part of the
        training.
        """
        # ``_disable_current_modes`` is private; ``tests/launch/test_private_names.py`` fails when
        # it changes.
        with _disable_current_modes():
            yield

    def restart(self) -> None:
        """Clear what was recorded, before the next action."""
        # ``_reached`` keeps its parameters, which were registered once, and forgets the gradients.
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
        """Return the ``id`` of each tensor without a gradient in all steps since the restart.

        A tensor without a gradient has None for it, not zeros: autograd never came to it.
        """
        if not self._stepped:
            # No optimizer stepped, so nothing is known.
            return frozenset()
        without: set[int] = set()
        for tensor, had_gradient in self._stepped.items():
            if not had_gradient:
                without.add(id(tensor))
        # DeepSpeed steps on flat partitions, which always have a gradient. There the parameters
        # count to which autograd came in no step.
        for parameter, reached in self._reached.items():
            if not reached and parameter not in self._stepped:
                without.add(id(parameter))
        return frozenset(without)

    def infos(self) -> dict[str, Any]:
        """Return what was recorded since the last restart, as fields of a ``Snapshot`` by name."""
        collectives: list[CollectiveInfo] = []
        for kind, sizes in sorted(self.collectives.items()):
            count = len(sizes)
            largest = max(sizes)
            total = sum(sizes)
            info = CollectiveInfo(kind.op, kind.dtype, count, largest, total, kind.ranks)
            collectives.append(info)
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
        """Return a hook that records the dtype of a layer's output."""

        def hook(_module: Module, inputs: tuple[Any, ...], output: Any) -> None:
            # A layer that is called with keyword arguments alone has no ``inputs``.
            if not self.active or not inputs:
                return
            if isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
                self.compute.add(dtype_name(output.dtype))

        return Hook(self._guarded("a forward hook of a layer", hook))

    def _dropout_hook(self, name: str) -> Hook:
        """Return a hook that records what the dropout of that name drops in training."""

        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling() or not self.active:
                return
            if not module.training or not torch.is_grad_enabled():
                return
            with self.aside():
                info = read_dropout(name, module.p, inputs[0], output)
                if info is not None:
                    self.dropouts.append(info)

        return Hook(self._guarded("a forward hook of a dropout", hook))

    def _pre_step(self, optimizer: Any, args: Any, kwargs: Any) -> _StepArguments | None:
        """Record what the optimizer is about to step on.

        Returns:
            The arguments of ``step`` with its closure wrapped, so that the gradients are recorded
            after the closure has computed them; None for a step without a closure.
        """
        # A step inside another optimizer's step belongs to the outer one: ZeroRedundancyOptimizer
        # lets a second optimizer step on this rank's shard. The same optimizer comes again if its
        # ``step`` calls that of a base class, or if its last step ended in an exception.
        if not self.active or self._stepping not in {0, id(optimizer)}:
            return None
        # ``_post_step`` sets it to 0 again.
        self._stepping = id(optimizer)
        self._state = set()
        self._record_gradients(optimizer)
        record = self._guarded("the closure of an optimizer's step", self._record_gradients)
        return with_closure(args, kwargs, functools.partial(record, optimizer))

    def _record_gradients(self, optimizer: Any) -> None:
        """Record which tensors the optimizer is about to update, and their gradients."""
        # Each tensor with the number of its parameter group.
        group_by_tensor: dict[torch.Tensor, int] = {}
        gradients: list[torch.Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                # The optimizer may have frozen parameters too, which it does not update.
                if not tensor.numel() or not tensor.requires_grad:
                    continue
                group_by_tensor[tensor] = number
                if tensor.grad is not None:
                    self._stepped[tensor] = True
                else:
                    self._stepped.setdefault(tensor, False)
        for tensor in group_by_tensor:
            if tensor.grad is not None:
                gradients.append(local_of(tensor.grad))
        with self.aside():
            model, trainers_optimizer, single = self.trainer()
            # This rank's share of the sum of the squares of all gradients, the ranks (``holders``)
            # whose shares add up to it, and the gradients of single parameters.
            read = read_gradients(model, trainers_optimizer, group_by_tensor, single=single)
            self._step = StepInfo(
                optimizer=type(optimizer).__name__,
                # The dtypes of the tensors that the optimizer updates: master weights, in mixed
                # precision.
                master=_dtypes_of(group_by_tensor),
                gradient=_dtypes_of(gradients),
                state=(),
                square=read.square,
                gradients=read.gradients,
                holders=read.holders,
                # Over how many ranks ZeRO++ shards a second copy of all weights; 0 for none.
                secondary=secondary_ranks(model),
                param_groups=tuple(numbers_of(group) for group in optimizer.param_groups),
            )

    def _post_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the dtypes of the optimizer's state; end the outermost step.

        The state is complete only after the step: Adam makes its moments in the first one.
        """
        if not self._stepping:
            # The step began while nothing was recorded.
            return
        for values in optimizer.state.values():
            if isinstance(values, Mapping):
                self._state.update(_dtypes_of_state(values))
        if self._stepping == id(optimizer) and self._step is not None:
            state = tuple(sorted(self._state))
            self.steps.append(dataclasses.replace(self._step, state=state))
            self._stepping = 0

    def _record_operator(self, func: Any, args: Any, result: Any) -> None:
        """Record an operator if it is a collective, a cast to float8, or in a block's forward.

        ``_OperatorMode`` calls it for each operator.

        Args:
            func: torch's operator, such as ``torch.ops.aten.mm.default``.
            args: Its positional arguments.
            result: What it has returned.
        """
        if func.namespace in {"c10d", "_c10d_functional"}:
            self._record_collective(func, args)
        # The result of a view is in float8 if its input is. A cast has no such input.
        if is_float8(result) and not any(is_float8(value) for value in args):
            self.float8 += 1
        if self._depth:
            kind = "others"
            # An operator's name is not public.
            if MULTIPLIES.search(func._schema.name):  # noqa: SLF001 - see above
                kind = "products"
            if not self._forward:
                kind = f"{kind} again"
            self.recomputed[kind] += 1

    def _record_collective(self, func: Any, args: Any) -> None:
        """Record the number of elements of each input tensor of a collective."""
        # An operator's name is not public: ``c10d::allreduce_``.
        qualified_name = func._schema.name  # noqa: SLF001 - see above
        name = qualified_name.split("::")[1].strip("_")
        ranks = group_ranks(func, args)
        for tensor in sent_tensors(args):
            kind = _CollectiveKind(name, dtype_name(tensor.dtype), ranks)
            self.collectives[kind].append(tensor.numel())


def _networks(model: Module, name: str = "") -> Iterator[tuple[str, Module]]:
    """Yield name and module of what a trainer calls: the model itself, if it has a forward.

    A container has none, such as that of the two networks of a GAN. Then it is what the container
    holds.
    """
    # A compiled model has a forward of its own, not of its class.
    has_forward = type(model).forward is not torch.nn.Module.forward or "forward" in vars(model)
    if has_forward:
        yield name, model
        return
    for child_name, child in model.named_children():
        full_name = child_name
        if name:
            full_name = f"{name}.{child_name}"
        yield from _networks(child, full_name)


def _no_trainer() -> _Trainer:
    """Return that no trainer is known yet."""
    return None, None, False


def _dtypes_of_state(values: Mapping[str, Any]) -> set[str]:
    """Return the dtypes of the state of one parameter that has a value for each element."""
    dtypes: set[str] = set()
    for key, value in values.items():
        if key == "step" or not isinstance(value, torch.Tensor):
            continue
        # A tensor without dimensions is one number for the whole parameter, as NAdam's
        # ``mu_product``.
        if value.numel() and value.dim():
            dtypes.add(stored_dtype(value))
    return dtypes


def _dtypes_of(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the tensors' dtypes, sorted."""
    return tuple(sorted({dtype_name(tensor.dtype) for tensor in tensors}))


# torch leaves the base class untyped.
class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that passes each operator of this thread to the observer.

    It sees collectives that C++ code calls too, such as those of DDP's reducer. torch's
    CommDebugMode works in the same way, but counts operators without their dtypes.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, or torch.compile would silently run the model uncompiled under this mode.

        torch calls it.
        """
        return True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._observer.record_operator(func, args, result)
        return result


def with_closure(args: Any, kwargs: Any, then: Callable[[], None]) -> _StepArguments | None:
    """Return the arguments of a step with a closure that calls ``then`` in the end.

    ``optimizer.step(closure)`` calls the closure, which computes loss and gradients. Lightning's
    Trainer takes every step so (https://docs.pytorch.org/docs/stable/optim.html). Gradients can be
    read only after the closure has run.

    Args:
        args: The positional arguments of ``step``; the first is the optimizer.
        kwargs: Its keyword arguments.
        then: Called once the closure has run.

    Returns:
        The positional and keyword arguments; None for a step without a closure.
    """
    closure = kwargs.get("closure")
    if not closure and len(args) > 1:
        # Behind the optimizer itself.
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
    optimizer, _, *others = args
    return (optimizer, wrapped, *others), kwargs

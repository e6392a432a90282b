"""One test for each private name that we use: when it fails, the message says which function needs attention."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import inspect
import multiprocessing.process
import multiprocessing.util
import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.launch.conftest import notes

from pytest_distcompat.ext.reuse import library_state
from pytest_distcompat.ext.reuse.process_state import _at_exit
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.request import Request
from pytest_distcompat.launch.warm import WarmLauncher
from pytest_distcompat.probe.parts import _not_saved

if TYPE_CHECKING:
    from tests.launch.conftest import Run

pytestmark = pytest.mark.spawn

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def with_deepspeed(warm: WarmLauncher, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """One run for both tests of DeepSpeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        return warm.run(Request("bodies:zero1", {}, 2, str(tmp_path_factory.mktemp("zero1"))))


def events(ending: Ending, kind: str) -> list[Mapping[str, Any]]:
    return notes(ending, kind)


def test_the_processes_of_the_agent(run: Run) -> None:
    ending = run("act", acts={"0": "os._exit 3", "1": "sleep"})
    assert ending.headline() == "rank 0 exited with code 3 without a report", (
        "LocalElasticAgent._pcontext or MultiprocessContext._pc.processes is not what it was: see "
        f"launch/agent.py:_exit_codes\n{ending.text()}"
    )


def test_the_fork_server_of_multiprocessing() -> None:
    from multiprocessing import forkserver, popen_forkserver

    known = {"_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"}
    first = list(inspect.signature(forkserver.main).parameters)[:3]
    assert first == ["listener_fd", "alive_r", "preload"], "forkserver.main is not what it was: see launch/forking.py"
    assert known <= vars(forkserver._forkserver).keys(), "ForkServer has other attributes: see launch/forking.py"
    looked_up = "connect_to_new_process" in inspect.getsource(popen_forkserver)
    assert looked_up, "popen_forkserver does not look connect_to_new_process up at each call: see launch/forking.py"


def test_the_exit_functions_of_atexit() -> None:
    assert callable(getattr(atexit, "_run_exitfuncs", None)), (
        "atexit._run_exitfuncs is gone: see launch/process.py:run_exit_functions"
    )


def test_the_finalizers_of_an_interpreter() -> None:
    class Owned:
        pass

    owned = Owned()
    finalizer = weakref.finalize(owned, print)
    assert finalizer in weakref.finalize._registry, (  # type: ignore[attr-defined]
        "weakref.finalize._registry is not what it was: see launch/preload.py:_keep_operators_of_torch"
    )
    finalizer.detach()


def test_the_watch_of_the_agent() -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    assert callable(getattr(LocalElasticAgent, "_monitor_workers", None)), (
        "LocalElasticAgent._monitor_workers is gone: launch/agent.py:WaitingAgent notes there when a rank was first seen to be gone"
    )


def test_the_queues_and_sentinels_of_the_agents_processes() -> None:
    import torch.multiprocessing
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    context = MultiprocessContext("two", print, {0: (), 1: ()}, {0: {}, 1: {}}, "spawn", DefaultLogsSpecs())
    assert [hasattr(queue, "_reader") for queue in context._ret_vals.values()] == [True, True], (
        "MultiprocessContext._ret_vals is not what it was: see launch/agent.py:WaitingAgent"
    )
    joined: Any = torch.multiprocessing
    assert hasattr(joined.ProcessContext([], []), "sentinels"), (
        "ProcessContext.sentinels is gone: see launch/agent.py:WaitingAgent"
    )


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_patterns_of_transformers() -> None:
    from transformers import conversion_mapping

    from pytest_distcompat.ext.upstream.models import _checkpoint_names  # noqa: F401 - imported for what that does

    assert conversion_mapping._checkpoint_conversion_mapping_cache is not None, (
        "transformers keeps its patterns elsewhere: see ext/upstream/models/_checkpoint_names.py, without which each rank compiles them"
    )


def test_the_name_of_an_operator(run: Run) -> None:
    ending = run("dispatched")
    assert {(event["namespace"], event["name"]) for event in events(ending, "operator")} == {
        ("c10d", "c10d::allreduce_")
    }, (
        "torch.utils._python_dispatch.TorchDispatchMode or OpOverload._schema.name is not what it was: see "
        f"probe/observe.py:_OperatorMode\n{ending.text()}"
    )


def test_the_group_of_an_operator(run: Run) -> None:
    ending = run("grouped")
    ranks_by_name = {event["name"]: event["ranks"] for event in events(ending, "operator")}
    expected = {"c10d::allreduce_": [0, 1], "_c10d_functional::all_gather_into_tensor": [0, 1]}
    assert {name: ranks_by_name.get(name) for name in expected} == expected, (
        "OpOverload._schema.arguments or distributed_c10d._resolve_process_group is not what it was: see "
        f"probe/operators.py:group_ranks\n{ending.text()}"
    )
    assert ranks_by_name["_c10d_functional::wait_tensor"] == [], (
        "an operator that waits has a group: see probe/operators.py:group_ranks"
    )


def test_the_disabling_of_dispatch_modes(run: Run) -> None:
    ending = run("watched", world_size=1)
    assert {event["when"]: event["calls"] for event in events(ending, "seen")} == {
        "before": 0,
        "watching": 0,
        "closely": 1,
        "aside": 0,
        "closely again": 1,
        "not closely": 0,
        "below another mode": 1,
        "still below it": 1,
        "below the first": 1,
        "below none": 1,
        "looked away": 0,
        "after": 0,
    }, (
        "torch.utils._python_dispatch has not what it had: _disable_current_modes, _get_current_dispatch_mode, _pop_mode, "
        f"_push_mode and _get_current_dispatch_mode_stack, see probe/observe.py:Observer.aside and record_operators\n{ending.text()}"
    )


def test_marks_of_compiled_and_checkpointed_modules(run: Run) -> None:
    ending = run("compiled", world_size=1)
    infos = {event["step"]: event for event in events(ending, "fact")}
    assert not ending.failed, (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper or torch._dynamo.utils.counters is not where it was: "
        f"see ext/upstream/drivers/_options.py:recompute and probe/live.py:_graph_count\n{ending.text()}"
    )
    assert infos["before"]["compiled"] == infos["after"]["compiled"] == ["0"], (
        "a module compiled in place has no _compiled_call_impl: see probe/live.py:compiled_modules"
    )
    assert infos["after"]["checkpointed"] == ["1"], "there is no CheckpointWrapper: see probe/live.py:_is_checkpointed"
    assert (infos["before"]["graphs"], infos["after"]["graphs"]) == (0, 1), (
        "counters['stats']['unique_graphs'] does not count graphs: see probe/live.py:_graph_count"
    )


@pytest.mark.nightly
@needs_deepspeed
def test_attributes_of_deepspeeds_parameters(with_deepspeed: Ending) -> None:
    elements = {"weight": 0, "bias": 0}
    for event in events(with_deepspeed, "parameter"):
        assert event["kept"] in {"tensor_fragment", "NoneType"}, (
            f"DeepSpeed no longer has parameter._hp_mapping: see probe/flat_masters.py:partitioned_numel\n{event}"
        )
        assert event["group"] == [0, 1], (
            f"parameter._dp_group is another: see probe/layouts.py:partition_layout\n{event}"
        )
        elements[event["name"]] += event["held"] or 0
    assert elements == {"weight": 12, "bias": 3}, (
        "the ranks' parameter._hp_mapping.lp_fragment_address.numel do not add up to the parameters: see "
        f"probe/flat_masters.py:partitioned_numel\n{with_deepspeed.text()}"
    )
    assert not with_deepspeed.failed, with_deepspeed.text()


@needs_deepspeed
def test_the_flat_partitions_of_zero3() -> None:
    """Where the masters of a parameter lie: DeepSpeed's accessor returns a copy of those that are offloaded."""
    stage3 = importlib.import_module("deepspeed.runtime.zero.stage3")
    optimizer = inspect.getsource(stage3.DeepSpeedZeroOptimizer_Stage3)
    for name in ("_z3_optimizer", "self.grad_position", "def get_param_id", "self.fp32_partitioned_groups_flat"):
        assert name in optimizer, f"DeepSpeed's stage 3 has no {name}: see probe/flat_masters.py:_in_zero3_partition"


@needs_deepspeed
def test_the_accumulation_dtype_of_deepspeed(with_deepspeed: Ending) -> None:
    assert [event["dtype"] for event in events(with_deepspeed, "accumulates")] == ["torch.bfloat16"] * 2, (
        "DeepSpeed's ZeRO optimizer has no gradient_accumulation_dtype: see probe/optimizer.py:_accumulation_dtype"
    )


@pytest.mark.nightly
@needs_deepspeed
def test_what_deepspeed_says_of_layers_that_autotp_has_cut(warm: WarmLauncher, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ending = warm.run(Request("bodies:autotp", {}, 2, str(tmp_path)))
    first, second = sorted(events(ending, "cut"), key=lambda event: str(event["cuts"]))
    assert (first["cuts"], second["cuts"]) == ([[[8, 4], 0, 0, 4], None], [[[8, 4], 0, 4, 4], None]), (
        f"DeepSpeed's parameters say otherwise how they were cut: see probe/deepspeed_shards.py:autotp_cut\n{ending.text()}"
    )
    assert "TensorParallel_Layer" in first["bases"], "the layers have another name: see probe/observe.py"
    assert {"0.weight": [8, 4], "0.bias": [8], "1.running_mean": [4]}.items() <= first["shapes"].items(), (
        "DeepSpeed's engine has no _consolidated_16bit_state_dict: see ext/upstream/drivers/_deepspeed_checkpoints.py:whole_weights"
    )


@pytest.mark.nightly
@needs_deepspeed
def test_the_experts_of_deepspeeds_layer(warm: WarmLauncher, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ending = warm.run(Request("bodies:experts", {}, 4, str(tmp_path)))
    experts = sorted(events(ending, "experts"), key=lambda event: int(event["number"]))
    assert [event["files"] for event in experts] == [8] * 4, f"experts are saved otherwise\n{ending.text()}"
    for rank, event in enumerate(experts):
        first = rank % 2 * 2
        names = {
            f"module.moe.deepspeed_moe.experts.deepspeed_experts.{expert}.{part}"
            for expert in (first, first + 1)
            for part in ("weight", "bias")
        }
        assert event["same"] == dict.fromkeys(names, True), (
            "experts are numbered otherwise: see probe/deepspeed_shards.py:moe_experts"
        )
        assert event["layouts"] == [["dp_replicate=Replicate, ep=Stage", [rank // 2 * 2, rank // 2 * 2 + 1]]]
        assert event["others"] == ["dp_replicate=Replicate"]
    refused = {event["text"] for event in events(ending, "refused")}
    assert refused == {
        "Native DeepSpeed MoE is not supported with ZeRO Stage 3. Use AutoEP or choose ZeRO stage 1/2."
    }, "ZeRO-3 has DeepSpeed's layer now: see parallel/expert_parallel.py:unsupported_reason"


@pytest.mark.nightly
@needs_deepspeed
def test_the_secondary_partition_of_deepspeed(warm: WarmLauncher, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ending = warm.run(Request("bodies:secondary", {}, 4, str(tmp_path)))
    assert [event["ranks"] for event in events(ending, "secondary")] == [[2, [2], 0]] * 4, (
        "DeepSpeed's parameters have no ds_secondary_tensor, or at other times: see probe/deepspeed_shards.py:secondary_ranks\n"
        f"{ending.text()}"
    )


@pytest.mark.nightly
@needs_deepspeed
def test_the_copies_that_deepspeed_optimizes_without_zero(warm: WarmLauncher, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ending = warm.run(Request("bodies:zero0", {}, 2, str(tmp_path)))
    assert [(event["of"], event["dtype"]) for event in events(ending, "copy")] == [
        ("weight", "torch.float32"),
        ("bias", "torch.float32"),
    ] * 2, (
        "DeepSpeed's optimizer no longer has fp16_groups beside fp32_groups: see probe/wrapped_optimizers.py:master_copies\n"
        f"{ending.text()}"
    )


@needs_deepspeed
def test_deepspeed_has_no_copies_of_shards() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    zero = {"stage": 3, "mics_shard_size": 2}
    with pytest.raises(DeepSpeedConfigError, match="MiCS ZeRO-3 sharding has been removed"):
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero})


@needs_deepspeed
@pytest.mark.parametrize(("dynamic", "expected"), [(True, {"hysteresis": 2.0}), (False, {})])
def test_the_hysteresis_of_deepspeeds_scaler(dynamic: bool, expected: dict[str, float]) -> None:
    import torch
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    from pytest_distcompat.probe.snapshot import read_scaler

    arguments = {
        "init_scale": 8.0,
        "scale_window": 9,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
    }
    scaler = CreateLossScaler(torch.half, 8.0, dynamic, arguments)
    state = read_scaler(None, SimpleNamespace(loss_scale=8.0, loss_scaler=scaler))
    assert state == {"scale": 8.0, **expected}, (
        "DeepSpeed's scalers are not what they were: see probe/snapshot.py:_hysteresis"
    )


@needs_deepspeed
def test_the_scaler_of_deepspeed(with_deepspeed: Ending) -> None:
    assert [event["there"] for event in events(with_deepspeed, "scaler")] == [True, True], (
        f"ZeRO's optimizer has no loss_scaler any more: see probe/snapshot.py:_hysteresis\n{with_deepspeed.text()}"
    )


@needs_deepspeed
def test_the_table_of_operators_of_deepspeed(with_deepspeed: Ending) -> None:
    for event in events(with_deepspeed, "operators"):
        assert event["known"], (
            "deepspeed.ops.__compatible_ops__ does not list the operator: see "
            f"launch/deepspeed_cpu.py:without_shared_memory\n{event['names']}"
        )
    assert len(events(with_deepspeed, "operators")) == 2, with_deepspeed.text()


def test_the_singletons_of_accelerate() -> None:
    state = pytest.importorskip("accelerate.state")
    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        assert isinstance(getattr(kind, "_shared_state", None), dict), (
            f"{kind.__name__}._shared_state is not what it was: see ext/reuse/library_state.py:_accelerate"
        )


@pytest.mark.parametrize(
    "name",
    [
        *(f"register_module_{what}_registration_hook" for what in ("buffer", "module", "parameter")),
        *(f"register_module_{what}_hook" for what in ("forward_pre", "forward", "full_backward_pre", "full_backward")),
        *(f"register_optimizer_step_{what}_hook" for what in ("pre", "post")),
    ],
)
def test_the_hooks_of_all_modules_and_optimizers(name: str) -> None:
    of_modules = importlib.import_module("torch.nn.modules.module")
    of_optimizers = importlib.import_module("torch.optim.optimizer")
    before = _hooks()
    handle = getattr(of_optimizers if "optimizer" in name else of_modules, name)(lambda *_: None)
    after = _hooks()
    handle.remove()
    assert sum(after) == sum(before) + 1, (
        f"{name} keeps its functions elsewhere: see ext/reuse/library_state.py:_hook_dicts"
    )
    assert _hooks() == before


def _hooks() -> list[int]:
    _, read = library_state.SETTINGS["torch's global hooks"]
    hooks: Any = read(sys.modules["torch"])
    return list(hooks)


def test_the_number_of_entered_modes() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    name, read = library_state.SETTINGS["torch's modes"]
    module = sys.modules[name]
    before: Any = read(module)
    with torch.overrides.TorchFunctionMode(), TorchDispatchMode():  # type: ignore[no-untyped-call]
        assert read(module) == (before[0] + 1, before[1] + 1), (
            "torch.overrides._get_current_function_mode_stack or torch.utils._python_dispatch."
            "_get_current_dispatch_mode_stack is not what it was: see ext/reuse/library_state.py:_modes"
        )


@pytest.mark.parametrize(
    ("module", "setting"), [("torch._dynamo.config", "suppress_errors"), ("torch._inductor.config", "max_autotune")]
)
def test_the_digest_of_torch_compile_settings(module: str, setting: str) -> None:
    config: Any = importlib.import_module(module)
    before = config.get_hash()
    with config.patch({setting: not getattr(config, setting)}):
        assert config.get_hash() != before, (
            f"{module}.get_hash does not depend on {setting}: see ext/reuse/library_state.py:SETTINGS"
        )
    assert config.get_hash() == before


def test_the_number_of_exit_functions() -> None:
    before = _at_exit()
    atexit.register(print)
    finalizer = multiprocessing.util.Finalize(None, print, exitpriority=1)
    after = _at_exit()
    atexit.unregister(print)
    finalizer.cancel()
    assert after == (before[0] + 1, before[1] + 1), (
        "atexit._ncallbacks or multiprocessing.util._finalizer_registry is not what it was: see "
        "ext/reuse/process_state.py:_at_exit"
    )


def test_the_buffers_that_a_state_dict_leaves_out() -> None:
    """Said by ``_non_persistent_buffers_set``, which ``probe.live`` reads."""
    import torch

    module = torch.nn.Module()
    module.register_buffer("table", torch.ones(2), persistent=False)
    module.register_buffer("kept", torch.ones(2))
    assert set(_not_saved(module)) == {"table"}
    assert set(module.state_dict()) == {"kept"}


def test_the_rendezvous_and_the_exit_barrier_of_several_nodes() -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    private = {
        LocalElasticAgent: ["_exit_barrier"],
        DynamicRendezvousHandler: ["_get_world", "_create_tcp_store_server"],
    }
    missing = [name for kind, names in private.items() for name in names if not callable(getattr(kind, name, None))]
    assert not missing, f"gone from torch: {missing}; launch/agent.py and ext/cluster/rendezvous.py override them"
    waits = ("_delay(seconds=1)", "self._state_holder = ", "self._cache_duration = ")
    gone = [text for text in waits if text not in inspect.getsource(dynamic_rendezvous)]
    assert not gone, f"torch waits otherwise, without {gone}: see ext/cluster/rendezvous.py"


def test_the_parent_of_a_process_of_multiprocessing() -> None:
    """``rank.forget_parent`` sets the names that ``multiprocessing.parent_process`` and ``Process`` read."""
    names = multiprocessing.process.parent_process.__code__.co_names
    assert "_parent_process" in names
    assert hasattr(multiprocessing.process, "_parent_process")
    assert multiprocessing.current_process()._identity == ()
    assert "_identity" in multiprocessing.process.BaseProcess.__init__.__code__.co_names


def test_what_waits_until_cuda_is_opened() -> None:
    """``World.divide_memory_once_used`` has torch call it then."""
    import torch

    assert callable(getattr(torch.cuda, "_lazy_call", None)), "gone from torch: torch.cuda._lazy_call, see world.py"


@needs_deepspeed
def test_the_groups_of_ulysses() -> None:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    for name in ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP"):
        assert hasattr(parallel_state_sp, name), (
            f"deepspeed has no {name} any more: see parallel/context_parallel.py:one_ulysses_of_several"
        )

"""Layouts of DTensors on meshes of one to three dimensions: digests of the parts of all ranks add up to that of the whole."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.digests import combine, concatenate

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pytest_distcompat.probe.deepspeed_shards import Cut
from pytest_distcompat.probe.gradients import read_gradients
from pytest_distcompat.probe.layouts import layout_of
from pytest_distcompat.probe.live import read_model
from pytest_distcompat.probe.optimizer import read_optimizer
from pytest_distcompat.probe.tensors import digest, local_of
from pytest_distcompat.trace import MeshDim, StateInfo

NAMES = ("dp_replicate", "dp_shard", "tp")


def ranks(size: int) -> Iterator[int]:
    """Be each rank of a process group that sends nothing, one after the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(size):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield rank
        finally:
            torch.distributed.destroy_process_group()


def parts(tensor: torch.Tensor, sizes: tuple[int, ...], placements: list[Any]) -> list[Any]:
    """The part of each rank."""
    pieces = []
    for _ in ranks(math.prod(sizes)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[-len(sizes) :])
        part = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        pieces.append((layout_of(part), digest(part), local_of(part).numel()))
    return pieces


SHARDS = (Shard(0), Shard(1), Shard(2))


@pytest.mark.parametrize("shape", [(4, 6, 8), (5, 3, 7), (1, 2, 9)])
@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        *(((size,), [shard]) for size, shard in itertools.product((2, 4), SHARDS)),
        *(((2, 2), [*pair]) for pair in itertools.product((Replicate(), *SHARDS), repeat=2)),
        ((2, 2, 2), [Replicate(), Shard(0), Shard(1)]),
        ((2, 2, 2), [Shard(1), Shard(1), Shard(2)]),
    ],
    ids=str,
)
def test_the_parts_of_each_copy_add_up(shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any]) -> None:
    tensor = torch.randn(shape)
    pieces_of_ranks = parts(tensor, sizes, placements)
    regions = {layout.region: pieces for layout, pieces, _ in pieces_of_ranks}
    assert all(regions[layout.region] == pieces for layout, pieces, _ in pieces_of_ranks), "replicas are not equal"
    for rank, (layout, _, _) in enumerate(pieces_of_ranks):
        group = layout.holders or (rank,)
        assert rank in group
        assert combine(pieces_of_ranks[piece][1] for piece in group) == digest(tensor)
        assert sum(pieces_of_ranks[piece][2] for piece in group) == tensor.numel()
        assert len(group) == math.prod(
            size for size, placement in zip(sizes, placements, strict=True) if placement.is_shard()
        )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_where_parts_of_autotp_start_in_the_whole(dim: int) -> None:
    """Parts of unlike sizes, whole and in the pieces that ZeRO's flat partitions make of them."""
    tensor = torch.arange(4 * 5 * 6).view(4, 5, 6)
    for coordinate, (first, size) in enumerate(((0, 3), (3, tensor.shape[dim] - 3))):
        cut = Cut((4, 5, 6), dim, first, size, (2, 3), coordinate)
        part = tensor.narrow(dim, first, size).flatten()
        for start, numel in ((0, None), (0, 7), (7, len(part) - 7), (len(part) - 1, 1)):
            starts = cut.starts(start, numel)
            piece = part[start:][:numel]
            assert starts is not None
            run = len(piece) // len(starts)
            assert (starts[:, None] + torch.arange(run)).flatten().tolist() == piece.tolist()
        assert cut.starts(5, 0) is None


def test_what_a_layout_says() -> None:
    pieces_of_ranks = parts(torch.randn(4, 4), (2, 2), [Replicate(), Shard(1)])
    assert pieces_of_ranks[3][0].dims == (MeshDim("dp_shard", 2, 1, "Replicate"), MeshDim("tp", 2, 1, "Shard(1)"))
    assert str(pieces_of_ranks[3][0]) == "dp_shard=Replicate, tp=Shard(1)"
    assert [layout.holders for layout, _, _ in pieces_of_ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_a_partial_sum_is_no_shard() -> None:
    for _ in ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layout = layout_of(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        assert str(layout) == "tp=Partial"
        assert layout.holders == ()
        # Each rank has another summand.
        assert layout.region


@pytest.mark.parametrize("features", [8, 6])
def test_fsdp2_over_tensor_parallel(features: int) -> None:
    """``_StridedShard``: rows that tensor parallelism has sharded, sharded again; and columns."""
    from torch.distributed.fsdp import fully_shard

    pieces_by_name: dict[str, list[tuple[Any, str]]] = {}
    torch.manual_seed(0)
    state = {
        "up.weight": torch.randn(8, features),
        "down.weight": torch.randn(features, 8),
        "norm.weight": torch.randn(8),
    }
    for _ in ranks(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        layers = {"up": torch.nn.Linear(features, 8, bias=False), "down": torch.nn.Linear(8, features, bias=False)}
        model: Any = torch.nn.Sequential(OrderedDict({**layers, "norm": torch.nn.LayerNorm(8, bias=False)}))
        model.load_state_dict(state)
        for name, placement in (("up", Shard(0)), ("down", Shard(1))):
            # As ``parallelize_module`` does it, which sends the rows.
            part = distribute_tensor(getattr(model, name).weight.detach(), mesh["tp"], [placement], src_data_rank=None)
            getattr(model, name).weight = torch.nn.Parameter(part)
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
        for info in read_model(model, None, None).parameters:
            pieces_by_name.setdefault(info.name, []).append((info.layout, info.digest))
    for name, pieces_of_ranks in pieces_by_name.items():
        assert {combine(pieces_of_ranks[rank][1] for rank in layout.holders) for layout, _ in pieces_of_ranks} == {
            digest(state[name])
        }, name
    texts = {name: str(pieces_of_ranks[0][0]) for name, pieces_of_ranks in pieces_by_name.items()}
    assert texts == {
        "up.weight": "dp_replicate=Replicate, dp_shard=StridedShard(0, 2), tp=Shard(0)",
        "down.weight": "dp_replicate=Replicate, dp_shard=Shard(0), tp=Shard(1)",
        "norm.weight": "dp_replicate=Replicate, dp_shard=Shard(0)",
    }
    assert {layout.holders for layout, _ in pieces_by_name["up.weight"]} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert {layout.holders for layout, _ in pieces_by_name["norm.weight"]} == {(0, 2), (1, 3), (4, 6), (5, 7)}


def test_what_fsdp1_has_flattened_is_cut_flat_and_what_ddp_wraps_is_whole() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    tensor = torch.nn.Linear(3, 5).weight.detach().clone()
    kinds: dict[str, list[Any]] = {"sharded": [], "ignored": [], "NO_SHARD": [], "DDP": []}
    for _ in ranks(2):
        layers = {name: torch.nn.Linear(3, 5, bias=False) for name in kinds}
        for layer in layers.values():
            layer.load_state_dict({"weight": tensor})
        settings: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
        both = torch.nn.Sequential(layers["sharded"], layers["ignored"])
        models = {
            "sharded": FullyShardedDataParallel(both, ignored_modules=[layers["ignored"]], **settings),
            "NO_SHARD": FullyShardedDataParallel(
                layers["NO_SHARD"], sharding_strategy=ShardingStrategy.NO_SHARD, **settings
            ),
            "DDP": DistributedDataParallel(layers["DDP"]),
        }
        for name, model in models.items():
            infos = read_model(model, None, None).parameters
            # ``_fsdp_flattened`` is private: see probe/layouts.py:wrapper_layouts.
            assert [info.layout.flat for info in infos] == [name == "sharded"] + [False] * (len(infos) - 1)
            kinds[name].append(infos[0])
            kinds["ignored"] += infos[1:]
    assert concatenate(info.digest for info in kinds["sharded"]) == digest(tensor)
    assert [info.layout.holders for info in kinds["sharded"]] == [(0, 1)] * 2
    assert {info.digest for name in ("ignored", "NO_SHARD", "DDP") for info in kinds[name]} == {digest(tensor)}
    assert {str(kinds[name][0].layout) for name in ("NO_SHARD", "DDP")} == {
        "dp_shard=Replicate",
        "dp_replicate=Replicate",
    }
    assert kinds["ignored"][0].layout.dims == ()


def test_masters_of_an_optimizer_of_its_own_are_held_as_the_model_is() -> None:
    """Copies in float32 that are no parameters of the model: DTensors, and pieces of what FSDP1 has flattened."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    settings: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    shares: dict[str, float] = dict.fromkeys(("FSDP1", "FSDP2"), 0.0)
    for _ in ranks(2):
        models: dict[str, Any] = {name: torch.nn.Linear(3, 4, bias=False) for name in shares}
        fully_shard(models["FSDP2"])
        models["FSDP1"] = FullyShardedDataParallel(models["FSDP1"], **settings)
        for name, model in models.items():
            masters = [parameter.detach().clone() for parameter in model.parameters()]
            for master in masters:
                master.grad = torch.ones_like(master)
            square, holders, _ = read_gradients(
                model, torch.optim.SGD(masters, lr=0.1), dict.fromkeys(masters, 0), single=True
            )
            assert holders == (0, 1), name
            shares[name] += square
    assert shares == dict.fromkeys(shares, 12.0)


def test_the_gradient_of_the_whole_of_a_parameter_in_parts() -> None:
    """As that of an embedding that transformers cuts: each rank has all of it, which counts once."""
    shares = 0.0
    tensor = torch.randn(4, 6)
    for _ in ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = torch.nn.Linear(6, 4, bias=False)
        model.weight = torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None))
        model.weight.grad = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()], src_data_rank=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        square, holders, (gradient,) = read_gradients(model, optimizer, {model.weight: 0}, single=True)
        assert holders == ()
        assert gradient.numel == 24
        assert gradient.layout.holders == ()
        shares += square
    assert shares == 2 * 24.0


def test_state_that_an_optimizer_makes_of_local_parts() -> None:
    """It is no DTensor, and its parts add up all the same."""
    tensor = torch.randn(4, 6)
    pieces: list[StateInfo] = []
    for _ in ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = torch.nn.Linear(6, 4, bias=False)
        model.weight = torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"average": local_of(model.weight.detach()).clone()}
        pieces += read_optimizer(model, optimizer).states
    assert [state.layout.holders for state in pieces] == [(0, 1), (0, 1)]
    assert combine(state.digest for state in pieces) == digest(tensor)


def test_a_step_count_is_the_same_on_ranks_that_hold_one_element_each() -> None:
    """A shard of one element has as many as the count, which says nothing of where it is."""
    counts = []
    for _ in ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = torch.nn.Linear(3, 2)
        model.bias = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)], src_data_rank=None))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.bias] = {"step": torch.tensor(3.0)}
        counts += [state.digest for state in read_optimizer(model, optimizer).states]
    assert counts == [digest(torch.tensor(3.0))] * 2

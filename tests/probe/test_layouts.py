"""Layouts of DTensors on meshes of one to three dimensions: digests of the parts of all ranks add up to that of the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_distcompat.digests import combine, concatenate

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pytest_distcompat.probe.deepspeed_shards import Cut
from pytest_distcompat.probe.gradients import read_gradients
from pytest_distcompat.probe.layouts import layout_of
from pytest_distcompat.probe.live import read_model
from pytest_distcompat.probe.optimizer import read_optimizer
from pytest_distcompat.probe.tensors import digest, local_of
from pytest_distcompat.trace import Layout, MeshDim, ParameterInfo, StateInfo

NAMES = ("dp_replicate", "dp_shard", "tp")
SHARDS = (Shard(0), Shard(1), Shard(2))
MESHES_AND_PLACEMENTS = [
    *(((size,), [shard]) for size, shard in itertools.product((2, 4), SHARDS)),
    *(((2, 2), [*pair]) for pair in itertools.product((Replicate(), *SHARDS), repeat=2)),
    ((2, 2, 2), [Replicate(), Shard(0), Shard(1)]),
    ((2, 2, 2), [Shard(1), Shard(1), Shard(2)]),
]


class Piece(NamedTuple):
    """What a rank holds of a tensor."""

    layout: Layout
    digest: str
    numel: int


def ranks(size: int) -> Iterator[int]:
    """Be each rank of a process group that sends nothing, one after the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(size):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield rank
        finally:
            torch.distributed.destroy_process_group()


def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh on the CPU, whose last dimension is ``tp``."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[-len(sizes) :])


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """Return the part of this rank, for which no rank sends anything."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def distributed_parameter(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute(tensor, mesh, *placements))


def parts(tensor: torch.Tensor, sizes: tuple[int, ...], placements: list[Any]) -> list[Piece]:
    """Return the part of each rank."""
    pieces = []
    for _ in ranks(math.prod(sizes)):
        part = distribute(tensor, mesh_of(*sizes), *placements)
        pieces.append(Piece(layout_of(part), digest(part), local_of(part).numel()))
    return pieces


@pytest.mark.parametrize("shape", [(4, 6, 8), (5, 3, 7), (1, 2, 9)])
@pytest.mark.parametrize(("sizes", "placements"), MESHES_AND_PLACEMENTS, ids=str)
def test_the_parts_of_each_copy_add_up(shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any]) -> None:
    tensor = torch.randn(shape)
    pieces = parts(tensor, sizes, placements)
    assert_replicas_are_equal(pieces)
    shards = number_of_shards(sizes, placements)
    for rank, piece in enumerate(pieces):
        group = piece.layout.holders or (rank,)
        pieces_of_group = [pieces[member] for member in group]
        assert rank in group
        assert len(group) == shards
        assert combined_digest(pieces_of_group) == digest(tensor)
        assert sum(member.numel for member in pieces_of_group) == tensor.numel()


def assert_replicas_are_equal(pieces: list[Piece]) -> None:
    """Check that ranks which hold the same region hold the same values."""
    digest_of_region: dict[Any, str] = {}
    for piece in pieces:
        expected = digest_of_region.setdefault(piece.layout.region, piece.digest)
        assert piece.digest == expected, "replicas are not equal"


def number_of_shards(sizes: tuple[int, ...], placements: list[Any]) -> int:
    """Return into how many parts these placements cut a tensor."""
    shards = 1
    for size, placement in zip(sizes, placements, strict=True):
        if placement.is_shard():
            shards *= size
    return shards


def combined_digest(pieces: Iterable[Any]) -> str:
    return combine(piece.digest for piece in pieces)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_where_parts_of_autotp_start_in_the_whole(dim: int) -> None:
    """Parts of unlike sizes, whole and in the pieces that ZeRO's flat partitions make of them."""
    tensor = torch.arange(4 * 5 * 6).view(4, 5, 6)
    sizes = (3, tensor.shape[dim] - 3)
    for coordinate, first in enumerate((0, 3)):
        size = sizes[coordinate]
        cut = Cut((4, 5, 6), dim, first, size, (2, 3), coordinate)
        part = tensor.narrow(dim, first, size).flatten()
        last = len(part) - 1
        for start, numel in ((0, None), (0, 7), (7, len(part) - 7), (last, 1)):
            starts = cut.starts(start, numel)
            assert starts is not None
            piece = part[start:][:numel]
            run = torch.arange(len(piece) // len(starts))
            places = starts[:, None] + run
            assert places.flatten().tolist() == piece.tolist()
        assert cut.starts(5, 0) is None


def test_what_a_layout_says() -> None:
    pieces = parts(torch.randn(4, 4), (2, 2), [Replicate(), Shard(1)])
    layouts = [piece.layout for piece in pieces]
    assert layouts[3].dims == (
        MeshDim("dp_shard", 2, 1, "Replicate"),
        MeshDim("tp", 2, 1, "Shard(1)"),
    )
    assert str(layouts[3]) == "dp_shard=Replicate, tp=Shard(1)"
    assert holders_of(pieces) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def holders_of(pieces: Iterable[Any]) -> list[tuple[int, ...]]:
    return [piece.layout.holders for piece in pieces]


def test_a_partial_sum_is_no_shard() -> None:
    for _ in ranks(2):
        summand = DTensor.from_local(torch.ones(2), mesh_of(2), [Partial()])
        layout = layout_of(summand)
        assert str(layout) == "tp=Partial"
        assert layout.holders == ()
        # Each rank has another summand.
        assert layout.region


@pytest.mark.parametrize("features", [8, 6])
def test_fsdp2_over_tensor_parallel(features: int) -> None:
    """``_StridedShard``: rows that tensor parallelism has sharded, sharded again; and columns."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    state = {
        "up.weight": torch.randn(8, features),
        "down.weight": torch.randn(features, 8),
        "norm.weight": torch.randn(8),
    }
    pieces_by_name: dict[str, list[ParameterInfo]] = {name: [] for name in state}
    for _ in ranks(8):
        mesh = mesh_of(2, 2, 2)
        model: Any = torch.nn.Module()
        model.up = torch.nn.Linear(features, 8, bias=False)
        model.down = torch.nn.Linear(8, features, bias=False)
        model.norm = torch.nn.LayerNorm(8, bias=False)
        model.load_state_dict(state)
        # As ``parallelize_module`` does it, which sends the rows.
        model.up.weight = distributed_parameter(model.up.weight.detach(), mesh["tp"], Shard(0))
        model.down.weight = distributed_parameter(model.down.weight.detach(), mesh["tp"], Shard(1))
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
        for info in read_model(model, None, None).parameters:
            pieces_by_name[info.name].append(info)
    layouts = {}
    for name, pieces in pieces_by_name.items():
        layouts[name] = str(pieces[0].layout)
        for piece in pieces:
            pieces_of_group = [pieces[rank] for rank in piece.layout.holders]
            assert combined_digest(pieces_of_group) == digest(state[name]), name
    assert layouts == {
        "up.weight": "dp_replicate=Replicate, dp_shard=StridedShard(0, 2), tp=Shard(0)",
        "down.weight": "dp_replicate=Replicate, dp_shard=Shard(0), tp=Shard(1)",
        "norm.weight": "dp_replicate=Replicate, dp_shard=Shard(0)",
    }
    assert set(holders_of(pieces_by_name["up.weight"])) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert set(holders_of(pieces_by_name["norm.weight"])) == {(0, 2), (1, 3), (4, 6), (5, 7)}


def test_what_fsdp1_has_flattened_is_cut_flat_and_what_ddp_wraps_is_whole() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    tensor = torch.nn.Linear(3, 5).weight.detach().clone()

    def layer() -> torch.nn.Linear:
        linear = torch.nn.Linear(3, 5, bias=False)
        linear.load_state_dict({"weight": tensor})
        return linear

    def fsdp1(module: torch.nn.Module, **settings: Any) -> Any:
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"), **settings)

    sharded, ignored, unsharded, ddp = [], [], [], []
    for _ in ranks(2):
        ignored_layer = layer()
        both = torch.nn.Sequential(layer(), ignored_layer)
        sharded_info, ignored_info = read_parameters(fsdp1(both, ignored_modules=[ignored_layer]))
        (unsharded_info,) = read_parameters(fsdp1(layer(), sharding_strategy=ShardingStrategy.NO_SHARD))
        (ddp_info,) = read_parameters(DistributedDataParallel(layer()))
        # ``_fsdp_flattened`` is private: see probe/layouts.py:wrapper_layouts.
        assert sharded_info.layout.flat is True
        for info in (ignored_info, unsharded_info, ddp_info):
            assert info.layout.flat is False
        sharded.append(sharded_info)
        ignored.append(ignored_info)
        unsharded.append(unsharded_info)
        ddp.append(ddp_info)
    assert concatenate(info.digest for info in sharded) == digest(tensor)
    assert holders_of(sharded) == [(0, 1), (0, 1)]
    for info in (*ignored, *unsharded, *ddp):
        assert info.digest == digest(tensor)
    layouts = {str(unsharded[0].layout), str(ddp[0].layout)}
    assert layouts == {"dp_shard=Replicate", "dp_replicate=Replicate"}
    assert ignored[0].layout.dims == ()


def read_parameters(model: torch.nn.Module) -> tuple[ParameterInfo, ...]:
    return read_model(model, None, None).parameters


def test_masters_of_an_optimizer_of_its_own_are_held_as_the_model_is() -> None:
    """Copies in float32 that are no parameters of the model: DTensors, and pieces of what FSDP1 has flattened."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    fsdp1_total = 0.0
    fsdp2_total = 0.0
    for _ in ranks(2):
        linear = torch.nn.Linear(3, 4, bias=False)
        fsdp1_model = FullyShardedDataParallel(linear, use_orig_params=True, device_id=torch.device("cpu"))
        fsdp1_total += square_of_masters(fsdp1_model)
        fsdp2_model = torch.nn.Linear(3, 4, bias=False)
        fully_shard(fsdp2_model)
        fsdp2_total += square_of_masters(fsdp2_model)
    assert fsdp1_total == 12.0
    assert fsdp2_total == 12.0


def square_of_masters(model: torch.nn.Module) -> float:
    """Return the squared norm of gradients of ones at copies of the parameters, which two ranks hold."""
    masters = []
    for parameter in model.parameters():
        master = parameter.detach().clone()
        master.grad = torch.ones_like(master)
        masters.append(master)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    square, holders, _ = read_gradients(model, optimizer, dict.fromkeys(masters, 0), single=True)
    assert holders == (0, 1)
    return square


def test_the_gradient_of_the_whole_of_a_parameter_in_parts() -> None:
    """As that of an embedding that transformers cuts: each rank has all of it, which counts once."""
    total = 0.0
    tensor = torch.randn(4, 6)
    for _ in ranks(2):
        mesh = mesh_of(2)
        model = torch.nn.Linear(6, 4, bias=False)
        model.weight = distributed_parameter(tensor, mesh, Shard(0))
        model.weight.grad = distribute(torch.ones(4, 6), mesh, Replicate())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        square, holders, gradients = read_gradients(model, optimizer, {model.weight: 0}, single=True)
        assert holders == ()
        (gradient,) = gradients
        assert gradient.numel == 24
        assert gradient.layout.holders == ()
        total += square
    assert total == 2 * 24.0


def test_state_that_an_optimizer_makes_of_local_parts() -> None:
    """It is no DTensor, and its parts add up all the same."""
    tensor = torch.randn(4, 6)
    states: list[StateInfo] = []
    for _ in ranks(2):
        model = torch.nn.Linear(6, 4, bias=False)
        model.weight = distributed_parameter(tensor, mesh_of(2), Shard(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = local_of(model.weight.detach()).clone()
        optimizer.state[model.weight] = {"average": average}
        states += read_optimizer(model, optimizer).states
    assert holders_of(states) == [(0, 1), (0, 1)]
    assert combined_digest(states) == digest(tensor)


def test_a_step_count_is_the_same_on_ranks_that_hold_one_element_each() -> None:
    """A shard of one element has as many as the count, which says nothing of where it is."""
    digests = []
    for _ in ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = torch.nn.Linear(3, 2)
        model.bias = distributed_parameter(torch.ones(2), mesh, Shard(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.bias] = {"step": torch.tensor(3.0)}
        for state in read_optimizer(model, optimizer).states:
            digests.append(state.digest)
    expected = digest(torch.tensor(3.0))
    assert digests == [expected, expected]

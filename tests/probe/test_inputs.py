"""Digests of what a model is fed, wherever it stands in the arguments."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from pytest_distcompat.probe.inputs import tensors_fed
from pytest_distcompat.probe.observe import Observer

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = torch.arange(3)


class Pair(NamedTuple):
    ids: torch.Tensor
    length: int


@dataclass
class Batch:
    ids: torch.Tensor
    name: str = "train"


class Store:
    """As torch_geometric keeps the tensors of a graph."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.mapping = {"ids": ids}
        self.parent = self


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: ids,
        lambda ids: {"ids": ids},
        lambda ids: UserDict(ids=ids),
        lambda ids: [{"images": [ids]}],
        lambda ids: Pair(ids, 3),
        Batch,
        lambda ids: {"graph": Store(ids)},
    ],
    ids=["itself", "dict", "mapping", "nested", "named tuple", "dataclass", "object"],
)
def test_tensors_are_found_in_arguments(make: Callable[[torch.Tensor], Any]) -> None:
    (tensors,) = tensors_fed([make(IDS), torch.tensor(1.0), "text", None, 3])
    assert tensors is IDS


def test_other_objects_are_ignored_if_there_is_a_tensor() -> None:
    assert tensors_fed([IDS, Store(torch.ones(2))]) == [IDS]


def test_a_model_among_the_arguments_is_no_input() -> None:
    assert tensors_fed([torch.nn.Linear(2, 2), {"self": torch.nn.Linear(2, 2)}]) == []


def test_recursive_containers_are_read() -> None:
    ring: list[Any] = [IDS]
    ring.append(ring)
    assert len(tensors_fed([ring])) == 1


class OfDict(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.layer(batch["x"]).sum()
        return out


def test_two_batches_in_dicts_have_different_digests() -> None:
    observer = Observer()
    model = OfDict()
    observer.attach(model)
    with observer.watching():
        model({"x": torch.ones(3)})
        model({"x": torch.zeros(3)})
    first, second = observer.infos()["inputs"]
    assert first
    assert second
    assert first != second


def test_a_compiled_model_is_watched_itself() -> None:
    observer = Observer()
    model: Any = torch.compile(OfDict(), backend="eager")
    observer.attach(model)
    with observer.watching():
        model({"x": torch.ones(3)})
    (digest,) = observer.infos()["inputs"]
    assert digest


def test_each_network_of_a_container_is_watched() -> None:
    """A trainer calls the networks of a GAN, never the container of both."""
    observer = Observer()
    gan: Any = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 1), "two": torch.nn.ModuleList([OfDict()])})
    observer.attach(gan)
    gan["two"].eval()
    with observer.watching():
        gan["one"](torch.ones(3))
        gan["two"][0]({"x": torch.zeros(3)})
    infos = observer.infos()
    first, second = infos["inputs"]
    assert first
    assert second
    assert first != second
    assert infos["evaluating"] == ("two.0", "two.0.layer")


def test_a_trainer_that_builds_the_model_itself_is_watched() -> None:
    observer = Observer()
    given = OfDict()
    own = OfDict()
    observer.attach(given)
    # Wrapped, as by DDP, it is the given one; torchtitan's is not.
    observer.attach_to_built(torch.nn.ModuleList([given]))
    observer.attach_to_built(own)
    with observer.watching():
        own({"x": torch.ones(3)})
        given({"x": torch.ones(3)})
    first, second = observer.infos()["inputs"]
    assert first == second
    assert len(observer.infos()["compute"]) == 1


def test_what_a_dropout_drops_is_read() -> None:
    observer = Observer()
    model = torch.nn.Sequential(torch.nn.Dropout(0.25), torch.nn.Dropout(0.0))
    observer.attach(model)
    with observer.watching():
        for seed, batch in ((1, torch.ones(60)), (1, 2 * torch.ones(60)), (2, torch.ones(60))):
            torch.manual_seed(seed)
            model(batch)
        # So few that two which draw by themselves drop the same now and then; and in evaluation nothing is dropped.
        model(torch.ones(20))
        model.eval()(torch.ones(60))
    first, scaled, again = observer.infos()["dropouts"]
    assert first.name == "0"
    assert first.zeros == scaled.zeros != again.zeros
    assert first.input == again.input != scaled.input


def test_a_convolution_computes() -> None:
    observer = Observer()
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.ReLU())
    observer.attach(model)
    with observer.watching():
        model(torch.ones(1, 1, 5))
    assert observer.infos()["compute"] == ("float32",)

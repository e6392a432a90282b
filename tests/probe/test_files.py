"""Reading the file layouts that trainers use, and naming what is missing."""

from __future__ import annotations

import json
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_distcompat.checks._saved_names import NO_READABLE_FILE
from pytest_distcompat.corrupt import corrupt
from pytest_distcompat.cost import BYTES
from pytest_distcompat.events import Start
from pytest_distcompat.ext.scripts import reading
from pytest_distcompat.probe.checkpoint_parts import MODEL
from pytest_distcompat.probe.files import PICKLED, module_directories, read_files, read_saved

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


class Small(torch.nn.Module):
    """With a part that is called like a part of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 3)
        self.head = torch.nn.Linear(3, 1, bias=False)


NAMES = ("model.weight", "model.bias", "head.weight")


@pytest.fixture
def state() -> dict[str, Any]:
    return dict(Small().state_dict())


@pytest.fixture
def optimizer() -> dict[str, Any]:
    model = Small()
    made = torch.optim.AdamW(model.parameters())
    model.head(model.model(torch.ones(2))).sum().backward()
    made.step()
    return dict(made.state_dict())


def keys_of_files(directory: Path, what: str = "model") -> list[tuple[str, ...]]:
    return [info.keys for info in read_files(directory) if info.holds == what]


def sorted_keys_of_files(directory: Path, what: str = "model") -> list[list[str]]:
    return [sorted(keys) for keys in keys_of_files(directory, what)]


def keys_by_path(files: Iterable[Any]) -> dict[str, set[str]]:
    return {file.path: set(file.keys) for file in files}


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt", "pth.tar"])
@pytest.mark.parametrize("part", ["", "model", "module", "model_state_dict", "state_dict", "model_state"])
def test_a_file_of_torch_save_is_read(
    tmp_path: Path, state: dict[str, Any], optimizer: dict[str, Any], suffix: str, part: str
) -> None:
    content: Mapping[str, Any] = state
    if part:
        content = {part: state, "optimizer_state_dict": optimizer, "epoch": 3}
    torch.save(content, tmp_path / f"last.{suffix}")
    assert keys_of_files(tmp_path) == [NAMES]
    saved = read_saved(tmp_path)
    keys_of_models = [info.keys for info in saved if info.holds == "model"]
    assert keys_of_models == [NAMES]
    has_optimizer = any(info.holds == "optimizer" for info in saved)
    assert has_optimizer == bool(part)
    assert corrupt(tmp_path, "truncate").path == f"last.{suffix}"
    assert keys_of_files(tmp_path) == []


def test_only_a_file_that_is_loaded_is_spoilt(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "for_others.bin")
    (tmp_path / "step-3").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "step-3" / "resumed.pt")
    assert corrupt(tmp_path, "truncate").path == "for_others.bin"
    spoilt = corrupt(tmp_path, "truncate", lambda path: path.parts[0] == "step-3")
    assert spoilt.path == "step-3/resumed.pt"


def test_an_average_of_the_model_has_its_names(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(Small())
    torch.save(averaged.state_dict(), tmp_path / "ema.pt")
    assert keys_of_files(tmp_path) == [NAMES]


def state_by_name(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state of each parameter by its name, where torch has a number."""
    return dict(zip(NAMES, optimizer["state"].values(), strict=True))


@pytest.mark.parametrize("part", ["optimizer", "optim", "optimizer_state_dict", "optimizer_state"])
def test_an_optimizer_by_names(tmp_path: Path, state: dict[str, Any], optimizer: dict[str, Any], part: str) -> None:
    named = {"state": state_by_name(optimizer), "param_groups": []}
    torch.save({"model": state, part: named}, tmp_path / "both.pth")
    assert keys_of_files(tmp_path, "optimizer") == [NAMES]


@pytest.mark.parametrize("parts", [("model",), ("app", "model"), ("state", "model_state_dict"), ()])
def test_a_distributed_checkpoint(
    tmp_path: Path, state: dict[str, Any], optimizer: dict[str, Any], parts: tuple[str, ...]
) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    content: dict[str, Any] = dict(state)
    if parts:
        content = {
            parts[-1]: state,
            "optim": {"state": state_by_name(optimizer)},
            "lr_scheduler": {"last_epoch": 3},
            "rng": torch.ones(3),
        }
    for part in parts[:-1]:
        content = {part: content}
    save(content, checkpoint_id=tmp_path, no_dist=True)
    assert sorted_keys_of_files(tmp_path) == [sorted(NAMES)]
    (model,) = (info for info in read_files(tmp_path) if info.holds == "model")
    assert model.shapes["model.weight"] == (3, 2)
    saved = {info.holds: info for info in read_saved(tmp_path)}
    assert set(saved["model"].digests) == set(NAMES)
    if parts:
        assert sorted_keys_of_files(tmp_path, "optimizer") == [sorted(NAMES)]
        assert set(saved) == {"model", "optimizer", "scheduler"}
    else:
        assert keys_of_files(tmp_path, "optimizer") == []
        assert set(saved) == {"model"}


def test_a_model_at_the_top_level_beside_an_optimizer(tmp_path: Path, state: dict[str, Any]) -> None:
    """As torchtitan's checkpointer writes it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    averages = {name: {"exp_avg": tensor} for name, tensor in state.items()}
    content = {**state, "optimizer": {"state": averages}, "train_state": {"step": 3}}
    save(content, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assert sorted_keys_of_files(tmp_path) == [sorted(NAMES)]
    assert sorted_keys_of_files(tmp_path, "optimizer") == [sorted(NAMES)]


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "data.tar").write_bytes(b"no pickle")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"ema": {"decay": 0.5}, "epoch": 1}, tmp_path / "other.pth")
    assert read_files(tmp_path) == ()


def test_the_check_lists_the_files_that_are_read() -> None:
    """It may not import the probe, which imports torch."""
    for suffix in PICKLED:
        assert suffix in NO_READABLE_FILE
    for name in MODEL:
        assert f"'{name}'" in NO_READABLE_FILE


def test_a_file_with_a_state_dict_for_each_network(tmp_path: Path) -> None:
    """As that of a GAN; averages of the weights are no network of the model."""
    weights = {"weight": torch.ones(2, 3)}
    content = {"critic": weights, "maker": weights, "ema": weights, "critic_optimizer": {"state": {}}, "epoch": 3}
    torch.save(content, tmp_path / "gan.pt")
    assert read_files(tmp_path) == ()
    critic, maker = read_files(tmp_path, networks=("critic", "maker", "frozen"))
    assert critic.path == "gan.pt:critic"
    assert critic.shapes == {"critic.weight": (2, 3)}
    assert maker.keys == ("maker.weight",)
    torch.save({**content, "model": weights}, tmp_path / "gan.pt")
    (model,) = read_files(tmp_path, networks=("critic", "maker"))
    assert model.path == "gan.pt:model"


def test_a_file_whose_keys_are_mapped_back(tmp_path: Path) -> None:
    torch.save({"net.weight": torch.ones(2, 3)}, tmp_path / "model.pt")
    (info,) = read_files(tmp_path)
    plain = info.renamed(lambda key: key.removeprefix("net."))
    assert plain.keys == ("weight",)
    assert plain.shapes == {"weight": (2, 3)}


def test_an_index(tmp_path: Path) -> None:
    weight_map = {"net.weight": "model-00001-of-00002.safetensors"}
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # Another library's file of that name.
    (tmp_path / "other.bin.index.json").write_text("[]", encoding="utf-8")
    (info,) = read_files(tmp_path)
    assert info.holds == "index"
    assert info.files == weight_map
    assert info.total_size == 24


def test_dtypes_of_safetensors_have_torchs_names(tmp_path: Path) -> None:
    """A counter such as BatchNorm's, of a dtype that nobody knows, would hide the sizes of all other tensors."""
    floats = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    integers = ("int64", "int32", "int16", "int8", "uint8", "bool")
    state = {}
    for name in (*floats, *integers):
        state[name] = torch.zeros(2, dtype=getattr(torch, name))
    save_file(state, tmp_path / "model.safetensors")
    (info,) = read_files(tmp_path)
    assert info.dtypes == {name: name for name in state}
    assert state.keys() <= BYTES.keys()


@pytest.mark.parametrize("form", ["safetensors", "torch", "distributed"])
def test_a_path_that_is_not_utf_8(form: str, state: dict[str, Any], tmp_path: Path) -> None:
    """As below a ``TMPDIR`` of such a name, which the libraries that read these files refuse."""
    directory = tmp_path / "\udcff\udcfe"
    if form == "safetensors":
        save_file(state, tmp_path / "model.safetensors")
    elif form == "torch":
        torch.save(state, tmp_path / "model.pt")
    else:
        save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    files = read_files(tmp_path)
    saved = read_saved(tmp_path)
    directory.mkdir()
    for path in tmp_path.iterdir():
        if path != directory:
            path.rename(directory / path.name)
    assert files
    assert read_files(directory) == files
    assert saved
    assert read_saved(directory) == saved


@pytest.mark.parametrize("name", ["nowhere", "\udcff\udcfe"])
def test_a_missing_directory_holds_nothing(name: str, tmp_path: Path) -> None:
    """As that of an export, where a trainer has none."""
    assert read_files(tmp_path / name) == ()
    assert not read_saved(tmp_path / name)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A model of sentence-transformers beside a checkpoint of itself, and a directory that it does not list."""
    save_modules(tmp_path)
    save_modules(tmp_path / "checkpoint-3")
    return tmp_path


def save_modules(directory: Path) -> None:
    pooling = directory / "1_Pooling"
    dense = directory / "2_Dense"
    other = directory / "other"
    for path in (pooling, dense, other):
        path.mkdir(parents=True)
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "x"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "x"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "x"},
    ]
    (directory / "modules.json").write_text(json.dumps(entries), encoding="utf-8")
    for path in (directory, pooling, dense):
        (path / "config.json").write_text("{}", encoding="utf-8")
    save_file({"encoder.weight": torch.ones(2)}, directory / "model.safetensors")
    torch.save({"linear.weight": torch.ones(3), "linear.bias": torch.ones(1)}, dense / "pytorch_model.bin")
    save_file({"weight": torch.ones(4)}, other / "model.safetensors")


OF_MODULES = {
    "2_Dense/pytorch_model.bin": {"2.linear.weight", "2.linear.bias"},
    "model.safetensors": {"0.encoder.weight"},
    "other/model.safetensors": {"weight"},
}


def test_keys_of_a_composite_model_have_its_modules_names(modules: Path) -> None:
    """Which of several files called model.safetensors a key stands in, ``saved_name(key)`` could not know."""
    expected = {}
    for path, keys in OF_MODULES.items():
        expected[path] = keys
        expected[f"checkpoint-3/{path}"] = keys
    assert keys_by_path(read_files(modules)) == expected
    assert keys_by_path(read_saved(modules)) == expected
    # The same of a file that the script was seen to save.
    (dense,) = read_files(modules / "2_Dense")
    assert set(dense.keys) == set(dense.shapes) == OF_MODULES["2_Dense/pytorch_model.bin"]


@pytest.mark.parametrize("last", ["", "2_Dense/pytorch_model.bin", "2_Dense"])
def test_the_final_model_is_that_of_all_module_directories(modules: Path, last: str) -> None:
    request = modules / "request.json"
    answer = modules / "answer.json"
    checkpoint = modules / "checkpoint-3"
    question = {"kind": "final", "path": str(modules / last), "checkpoints": [str(checkpoint)]}
    request.write_text(json.dumps(question), encoding="utf-8")
    reading.main(str(request), str(answer))
    content = json.loads(answer.read_text(encoding="utf-8"))
    assert content["problem"] == ""
    assert content["stored"] is True
    names = {info["name"] for info in content["unwrapped"]["parameters"]}
    assert names == {"0.encoder.weight", "2.linear.weight", "2.linear.bias"}
    keys = set()
    for file in content["files"]:
        keys.update(file["keys"])
    assert keys == names


def test_files_are_read_in_an_environment_without_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a script under ``uv run``: without ``site`` an interpreter does not see an editable installation."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = tmp_path / "python"
    packages = sysconfig.get_path("purelib")
    command = f'PYTHONPATH="$PYTHONPATH:{packages}" exec "{sys.executable}" -S "$@"'
    python.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    python.chmod(0o755)
    start = Start(1, python=str(python), cwd=str(tmp_path))
    assert reading.read_in_a_process(start, tmp_path, {"kind": "files", "paths": []}) == {"files": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[1]",
        '[{"path": "1"}]',
        '[{"name": "1", "path": ".."}]',
        '[{"name": "1", "path": "a/b"}]',
    ],
)
def test_an_invalid_module_index_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text, encoding="utf-8")
    assert module_directories(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("layer_03-model_states.pt", "3.weight"),
        ("layer_112-model_00-model_states.pt", "112.weight"),
        ("mp_rank_00_model_states.pt", "weight"),
    ],
)
def test_the_keys_of_a_layer_of_deepspeeds_pipelines_begin_with_its_number(name: str, key: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / name)
    (info,) = read_files(tmp_path)
    assert info.keys == (key,)

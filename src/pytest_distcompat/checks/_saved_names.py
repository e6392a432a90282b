"""Part of the check ``names``: the keys of saved files are the names of the unwrapped model.

The unwrapped model is the model before anything wraps it.

``checks.names`` calls ``wrong_names_in_files`` once the run ``train`` has ended. Its trace has a
record of each file of the checkpoint, and at the end of the run also of the export: path, what it
holds (``model``, ``optimizer``, ``index``), keys and shapes. The function yields findings, such as
``file 'model.safetensors': 9 keys have the extra prefix `_orig_mod.`: key
'_orig_mod.lm_head.weight' is no name of the unwrapped model; expected 'lm_head.weight'``.

It asks ``ExpectedNames``, which knows the names that tensors must have, about each file:

- ``known_in``: which keys it may have, without a finding;
- ``renamed_in``: its other keys, in groups that differ from the model's names in the same way, as
  by the extra prefix ``_orig_mod.``;
- ``names_in``: which tensors it has, by the model's names and with renamed keys resolved;
- ``has_key_of_model``: whether any of its keys is such a name, perhaps a changed one.

Its sets of names are ``in_files`` (all parameters), ``trainable``, ``persistent`` and
``not_persistent`` (buffers that are saved or not), ``updated`` (parameters for which an optimizer
must have state) and ``written`` (what the model's library writes in place of the model's own names,
empty if it writes those). A tied tensor has several names, and counts under the first of them
(``first_name``).
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.checks._base import first_three
from pytest_distcompat.checks._expected_names import ExpectedNames
from pytest_distcompat.model_values import named_stage, stages_of
from pytest_distcompat.trace import FileInfo, RunTrace, Trace

#: The finding when no saved file is one that ``probe.files`` can read.
NO_READABLE_FILE = (
    "no file holds a model by names; "
    "read are .safetensors, torch.distributed.checkpoint, DeepSpeed's, and what torch.save wrote "
    "(.pt, .pth, .bin, .ckpt, .tar): "
    "a state dict by itself, or under 'model', 'model_state_dict', 'state_dict', 'model_state' "
    "or 'module', or one under the name of each network of the model"
)


def wrong_names_in_files(expected: ExpectedNames, trace: Trace) -> Iterator[str]:
    """Yield findings for names in saved files.

    The checkpoint must also have every name. Files that are written later, such as the export, may
    hold less; only their keys are checked.
    """
    run = trace.run()
    # The files as each action ``files`` of the run listed them.
    written: list[list[FileInfo]] = []
    for index in run.indices("files"):
        files: list[FileInfo] = []
        for snapshot in run.at_index(index):
            files += snapshot.files
        written.append(files)
    if written:
        yield from _checkpoint(expected, written[0], run)
    # A script that saved nothing has no files, and nor has one process that stands in for ranks,
    # whose tensors have no values. Any other run without files lacks all names.
    elif trace.saves and run.has_values:
        yield from _checkpoint(expected, [], run)
    for later_files in written[1:]:
        yield from _keys(expected, later_files)


def _checkpoint(expected: ExpectedNames, files: list[FileInfo], run: RunTrace) -> Iterator[str]:
    """Yield findings for keys of saved files, and for names that no file holds."""
    yield from _keys(expected, files)
    in_models: set[str] = set()
    in_optimizers: set[str] = set()
    for file in files:
        if file.holds == "model":
            in_models |= expected.names_in(file)
        # An index (``model.safetensors.index.json``) holds no tensors, but says in which files they
        # are: its keys do not count as saved.
        elif file.holds != "index":
            in_optimizers |= expected.names_in(file)
    yield from _missing_of_model(expected, in_models, run)
    if not in_models:
        yield NO_READABLE_FILE
    # It is empty if the optimizer's state is saved by the number of a parameter, not by its name.
    if in_optimizers:
        yield from _missing(
            "trainable parameters' optimizer states", expected.updated, in_optimizers
        )


def _missing_of_model(expected: ExpectedNames, saved: set[str], run: RunTrace) -> Iterator[str]:
    """Yield findings for parameters and persistent buffers that no file of a model holds."""
    kind = "parameters"
    parameters = expected.in_files
    buffers = expected.persistent
    # Of a LoRA adapter only its own parameters are saved, which are the trainable ones.
    if expected.cell.option("lora"):
        parameters = expected.trainable
        buffers = set()
    if expected.written_by_library(saved) and not parameters <= saved:
        # The model's library has written names of its own (``Driver.written_names``), so all of
        # those must be there instead. ``saved`` has first names.
        kind = "names that the library writes"
        parameters = {expected.first_name(name) for name in expected.written}
        buffers = set()
    for text in _missing(kind, parameters, saved):
        # If one pipeline stage holds all missing names, the finding says which.
        holders = _only_holders(expected, run, expected.in_files - saved)
        if not holders:
            yield text
            continue
        where = named_stage(run, holders)
        verb = "holds" if len(holders) == 1 else "hold"
        yield f"{text}; {where} alone {verb} them"
    yield from _missing("persistent buffers", buffers, saved)


def _missing(kind: str, names: set[str], saved: set[str]) -> Iterator[str]:
    """Yield a finding for the names that no file holds; ``kind`` says in words what they are."""
    missing = sorted(names - saved)
    count = len(missing)
    if count:
        first = first_three(missing)
        yield f"{count} of {len(names)} {kind} are in no saved file, first {first}"


def _only_holders(expected: ExpectedNames, run: RunTrace, names: set[str]) -> list[int]:
    """Return the ranks of the only pipeline stage that holds all parameters of these names.

    The result is empty if no stage holds all of them, or if there is no pipeline.
    """
    if not stages_of(run):
        return []
    holders: list[int] = []
    for snapshot in run.at("build"):
        live_names = expected.unwrapped_names_of(snapshot.parameters)
        if live_names.isdisjoint(names):
            continue
        if not names <= live_names:
            return []
        holders.append(snapshot.rank)
    return holders


def _keys(expected: ExpectedNames, files: list[FileInfo]) -> Iterator[str]:
    """Yield a finding for each key that is no name of the unwrapped model or has another shape."""
    models = []
    for file in files:
        if file.holds == "model":
            models.append(file)
    # Files of other tensors may be beside those of the model: random states, statistics of data.
    # If no file has a key of the model, all are checked, so that a wrong name is not overlooked.
    of_model = []
    for file in models:
        if expected.has_key_of_model(file):
            of_model.append(file)
    if not of_model:
        of_model = models
    for file in files:
        if file.holds == "optimizer" or file in of_model:
            for text in _keys_of_file(expected, file):
                yield f"file {file.path!r}: {text}"


def _keys_of_file(expected: ExpectedNames, file: FileInfo) -> Iterator[str]:
    """Yield texts about wrong keys of one file; keys that differ alike have one text together."""
    in_groups: set[str] = set()
    for group in expected.renamed_in(file):
        # ``names`` maps each key of the group to the name that it stands for. As text a group is
        # "9 keys have the extra prefix `_orig_mod.`"; ``way_out`` is advice, or empty.
        in_groups.update(group.names)
        first = min(group.names)
        name = group.names[first]
        yield (
            f"{group}: key {first!r} is no name of the unwrapped model; "
            f"expected {name!r}{group.way_out}"
        )
    known = expected.known_in(file)
    renamed_by_library = expected.written_by_library(file.keys)
    for key in file.keys:
        if key in in_groups:
            continue
        if key not in known:
            yield _unknown_key(expected, key, known)
        elif not renamed_by_library:
            # If the library renames keys, a key may be the model's own name of another tensor, so
            # that shapes cannot be compared.
            yield from _other_shape(expected, file, key)


def _unknown_key(expected: ExpectedNames, key: str, known: set[str]) -> str:
    """Return what is wrong with a key that is none of the ``known`` names of its file."""
    if key in expected.not_persistent:
        return f"holds {key!r}, a buffer that is not persistent"
    unknown = f"key {key!r} is no name of the unwrapped model"
    closest = expected.unwrapped_name(key)
    if closest in known:
        return f"{unknown}; expected {closest!r}"
    return unknown


def _other_shape(expected: ExpectedNames, file: FileInfo, key: str) -> Iterator[str]:
    """Yield a finding if the tensor under a key has another shape than in the unwrapped model."""
    if key not in file.shapes:
        return
    saved_shape = tuple(file.shapes[key])
    shape = expected.shape(key)
    # The shape is known of parameters and buffers only, not of other entries of a state dict.
    if shape is not None and saved_shape != shape:
        yield f"{key!r} has shape {saved_shape}; {shape} in the unwrapped model"

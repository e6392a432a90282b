"""Which architectures transformers has: its tables of model types, tasks and classes.

A cell, one configuration under test, may train an architecture of transformers as a tiny model:
``fsdp2-fp32-w2-model_hf:gpt2`` names a model type, ``model_hf:BertForMaskedLM`` a class.
``entry_of`` finds the class for such a name; ``_architectures.py`` and ``_small_config.py`` make a
model of it. ``architectures`` lists the models of the profile ``zoo``: every causal language model,
and one class of each other task.

pytest's process calls these functions when it collects tests. It must not import transformers,
which imports torch and takes seconds. So the tables are read from the source of
``transformers/models/auto/modeling_auto.py``, which assigns pairs of model type and class names::

    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict([("gpt2", "GPT2LMHeadModel"), ...])

Of some architectures no tiny model can be made. ``UNSUPPORTED`` (model type or class -> reason) and
``UNSUPPORTED_TASKS`` (task -> reason) list them.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.upstream.models._unsupported import UNSUPPORTED, UNSUPPORTED_TASKS

#: What such names of models begin with.
PREFIX = "hf:"
#: The task of causal language models: the middle of ``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES``.
CAUSAL = "causal_lm"
#: The tasks that ``hf:MODEL_TYPE`` is looked for in first, then transformers' others in its order.
FIRST = (CAUSAL, "seq_to_seq_causal_lm", "masked_lm", "image_classification", "ctc")


@dataclass(frozen=True)
class Entry:
    """An entry of transformers' auto classes.

    All fields are empty for a model that transformers does not know.

    Attributes:
        model_type: Spelled as transformers spells it, perhaps with hyphens: ``xlm-roberta``.
        task: Lower-case name of the auto class's table, such as ``causal_lm``.
        class_name: Name of the model class for this task: ``XLMRobertaForCausalLM``.
    """

    model_type: str = ""
    task: str = ""
    class_name: str = ""

    @property
    def id(self) -> str:
        """The model type as it stands in a cell's id."""
        return _id(self.model_type)


def _id(model_type: str) -> str:
    """Return a model type without hyphens, as it stands in a cell's id."""
    return model_type.replace("-", "_")


def source_of(*parts: str) -> Path | None:
    """Return the path of a file below transformers' ``models``; None without transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent.joinpath("models", *parts)


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    """Return task -> model type -> class name, those of ``FIRST`` first.

    Empty without transformers.
    """
    source = source_of("auto", "modeling_auto.py")
    if source is None:
        return {}
    tables = {}
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        task = _task_of_table(statement)
        if task is None:
            continue
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call):
            continue
        # A table of another form is no list of pairs; none of its models is tested.
        pairs = call.args[0]
        if isinstance(pairs, ast.List):
            tables[task] = _read_table(pairs)
    first_tables = {task: tables[task] for task in FIRST if task in tables}
    return {**first_tables, **tables}


def _task_of_table(statement: ast.stmt) -> str | None:
    """Return the task whose table the statement assigns; None for another statement.

    The assignment may have an annotation (``ast.AnnAssign``).
    """
    if isinstance(statement, ast.Assign):
        target: Any = statement.targets[0]
    else:
        target = getattr(statement, "target", None)
    match = re.fullmatch(r"MODEL_FOR_(\w+?)(_MAPPING)?_NAMES", getattr(target, "id", ""))
    return match[1].lower() if match else None


def _read_table(pairs: ast.List) -> dict[str, str]:
    """Return model type -> class name; of several classes for one model type, the first."""
    table = {}
    for pair in pairs.elts:
        # ``*OTHER_TABLE.items()``: what a table takes from another one is in that one.
        if isinstance(pair, ast.Starred):
            continue
        model_type, classes = ast.literal_eval(pair)
        table[model_type] = classes if isinstance(classes, str) else classes[0]
    return table


def _entries() -> Iterator[Entry]:
    """Yield all entries of transformers' tables, by task."""
    for task, table in _tables().items():
        for model_type, class_name in table.items():
            yield Entry(model_type, task, class_name)


@functools.cache
def entry_of(model: str) -> Entry:
    """Return the first entry with this model type or class name; an empty entry if there is none.

    Args:
        model: The name without the prefix: ``xlm_roberta``, with underscores, or a class name.
    """
    for entry in _entries():
        if model in {entry.id, entry.class_name}:
            return entry
    return Entry()


def of_tasks() -> dict[str, str]:
    """Return the class that the profile ``zoo`` trains for each task but causal language models.

    For example ``{"masked_lm": "BertForMaskedLM", ...}``. A class is the first one of transformers'
    table that is not in UNSUPPORTED, if possible of a model type that no other task has. It is
    empty for a task of which no class can be trained.
    """
    class_by_task = {}
    used_types = set(_tables().get(CAUSAL, ()))
    for task in _tables():
        if task == CAUSAL:
            continue
        entry = _entry_to_train(task, used_types)
        class_by_task[task] = entry.class_name
        used_types.add(entry.model_type)
    return class_by_task


def _entry_to_train(task: str, used_types: set[str]) -> Entry:
    """Return the first entry of a task that can be trained; an empty one if none can.

    If possible it is one of an unused model type.
    """
    candidates = []
    for entry in _entries():
        if entry.task == task and not reason_of(entry):
            candidates.append(entry)
    for entry in candidates:
        if entry.model_type not in used_types:
            return entry
    return candidates[0] if candidates else Entry()


def architectures() -> tuple[str, ...]:
    """Return the names of the models of the profile ``zoo``.

    They are all causal language models, and one model of each other task.
    """
    model_types = sorted(_tables().get(CAUSAL, ()))
    models = [_id(model_type) for model_type in model_types]
    models += [class_name for class_name in of_tasks().values() if class_name]
    return tuple(f"{PREFIX}{model}" for model in dict.fromkeys(models))


def reason_of(entry: Entry) -> str:
    """Return why the tables have no tiny model of an entry; empty if they give no reason."""
    for name in (entry.id, entry.class_name):
        if name in UNSUPPORTED:
            return UNSUPPORTED[name]
    return UNSUPPORTED_TASKS.get(entry.task, "")

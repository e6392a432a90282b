"""Settings are read from what is installed, get values from their types, and are judged by one rule."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import importlib.util
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_distcompat.cell import OPTIONS, Cell, setting_value
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.cli.main import main
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.expect import fails
from pytest_distcompat.ext.upstream.sweep import rules
from pytest_distcompat.ext.upstream.sweep.fields import Field, Source
from pytest_distcompat.ext.upstream.sweep.pairs import covering_rows, reduced_failures, smallest
from pytest_distcompat.ext.upstream.sweep.reading import read_fields
from pytest_distcompat.ext.upstream.sweep.rules import Setting
from pytest_distcompat.ext.upstream.sweep.slice import SLICE
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.judge import judge
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.profiles import left_out
from pytest_distcompat.scenario import REFERENCE_RUN
from pytest_distcompat.status import Status
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunFailure, RunTrace, Trace


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Plugin:
    flag: bool = True
    colour: Colour = Colour.RED
    mode: Literal["a", "b-c"] = "a"
    maybe: Optional[bool] = None  # noqa: UP045 - as libraries spell it
    size: int = 2
    part: float = 0.5
    text: str = ""
    callback: Any = None


class Derived(Plugin):
    pass


def read_config(config: dict[str, Any]) -> None:
    if "outer" in config:
        config["outer"].get("inner", True)
    config.get("size", 3)
    assert "size" not in config.keys() or config["size"]  # noqa: SIM118 - as libraries spell it
    config.setdefault("name", "x")


@dataclasses.dataclass
class Launched:
    clipping: Optional[float] = None  # noqa: UP045 - as libraries spell it
    prefetch: Optional[bool] = None  # noqa: UP045
    level: int = 1

    def __post_init__(self) -> None:
        if self.clipping is None:
            self.clipping = float(os.environ.get("LAUNCHED_CLIPPING", "0.5"))
        if self.prefetch is None:
            self.prefetch = os.environ.get("LAUNCHED_PREFETCH", "false") == "true"
        os.environ["LAUNCHED_LEVEL"] = os.environ.get("UNRELATED", "1")


def json_of(made: Launched) -> dict[str, Any]:
    return {"clipping": made.clipping, "zero_optimization": {"prefetch": made.prefetch}}


HERE = "tests_of_settings"


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fields of an object of this module, by name."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])

    def of(name: str, kind: str = "fields", becomes: str = "") -> dict[str, Field]:
        if becomes:
            becomes = f"{HERE}.{becomes}"
        source = Source(name, f"{HERE}.{name}", ("ddp",), kind, becomes=becomes)
        return {field.name: field for field in read_fields([source])}

    return of


def test_values_come_from_the_type_without_the_default(fields: Any) -> None:
    assert values_of(fields("Plugin")) == {
        "Plugin.flag": ("false",),
        "Plugin.colour": (f"{Colour.__module__}.Colour.BLUE",),
        "Plugin.mode": ("b~c",),
        "Plugin.maybe": ("true", "false"),
        "Plugin.size": ("0", "1", "7", "1000003"),
        "Plugin.part": ("0.0", "1.0"),
        "Plugin.text": (),
        "Plugin.callback": (),
    }


def values_of(field_by_name: dict[str, Field]) -> dict[str, tuple[str, ...]]:
    return {name: field.values for name, field in field_by_name.items()}


def places_of(field_by_name: dict[str, Field]) -> dict[str, tuple[str, ...]]:
    return {name: field.places for name, field in field_by_name.items()}


def test_subclasses_are_sources_of_their_own(fields: Any) -> None:
    assert "Derived.flag" in fields("Plugin", "subclasses")


def test_keys_that_a_reader_looks_up_are_fields_with_their_defaults(fields: Any) -> None:
    field_by_name = fields("read_config", "keys")
    defaults = {name: field.default for name, field in field_by_name.items()}
    assert defaults == {
        "read_config.outer.inner": "true",
        "read_config.size": "3",
        "read_config.name": "x",
    }


def read_files(path: str, *, strict: bool = True, **kwargs: Any) -> None:
    """A function that takes some arguments out of its further keywords."""
    kwargs.pop("workers", 2)
    kwargs.pop("_from_library", None)
    for name in ("old", "older"):
        kwargs.pop(name, None)
    del path, strict


def test_keywords_that_a_function_takes_out_are_fields(fields: Any) -> None:
    assert values_of(fields("read_files")) == {
        "read_files.path": (),
        "read_files.strict": ("false",),
        "read_files.workers": ("0", "1", "7", "1000003"),
    }


def test_limits_of_a_pydantic_field_hold_for_its_values(fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model(
        "Limited",
        size=(int, pydantic.Field(5, ge=1, lt=7)),
        inner=(pydantic.create_model("In", on=(bool, False)), None),
    )
    monkeypatch.setitem(globals(), "Limited", model)
    field_by_name = fields("Limited")
    assert field_by_name["Limited.size"].values == ("1", "2")
    assert field_by_name["Limited.inner.on"].values == ("true",)


def test_an_environment_variable_is_a_setting_if_it_changes_a_field(fields: Any) -> None:
    field_by_name = fields("Launched", "environment")
    assert places_of(field_by_name) == {
        "env.LAUNCHED_CLIPPING": ("Launched.clipping",),
        "env.LAUNCHED_PREFETCH": ("Launched.prefetch",),
    }
    assert values_of(field_by_name) == {
        "env.LAUNCHED_CLIPPING": ("0.0", "0.5", "1.0"),
        "env.LAUNCHED_PREFETCH": ("true", "false"),
    }
    assert "LAUNCHED_LEVEL" not in os.environ


def test_a_field_and_a_key_of_the_json_say_the_same_if_one_changes_the_other(fields: Any) -> None:
    assert places_of(fields("Launched", becomes="json_of")) == {
        "Launched.clipping": ("ds_config.clipping",),
        "Launched.prefetch": ("ds_config.zero_optimization.prefetch",),
        "Launched.level": (),
    }
    # A variable that one object sets would change what the next one reads.
    assert "LAUNCHED_LEVEL" not in os.environ


def test_the_same_is_said_twice_with_equal_values_different_ones_and_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "rules", list)
    place = "ds_config.clipping"
    field = Field("Launched.clipping", "float", "0.5", ("0.0", "1.0"), ("zero2",), "fp32", (place, "env.NOT_READ_HERE"))
    assert rules.ruled(field, {"Launched.clipping"}).twice == (
        f"{place}=0.0+Launched.clipping=0.0",
        f"{place}=0.0+Launched.clipping=1.0",
        f"{place}=1.0+Launched.clipping=0.0",
        f"{place}=auto+Launched.clipping=0.0",
    )


def test_what_is_excluded_is_said_twice_with_the_drivers_value_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"fields": ["*.clipping"], "excluded": True, "without": ["parity"], "reason": "an option"}
    field = Field("Launched.clipping", "float", "", ("0.0", "1.0"), ("zero2",), "fp32", ("ds_config.clipping",))
    monkeypatch.setattr(rules, "rules", lambda: [rule])
    assert rules.ruled(field).cells == ()
    said_twice = rule | {"twice": ["0.5", "1.0"], "beside": "A.b=1+"}
    monkeypatch.setattr(rules, "rules", lambda: [said_twice])
    assert "A.b=1+ds_config.clipping=0.5+Launched.clipping=1.0" in rules.ruled(field).cells
    assert rules.meant_to_fail("ds_config.clipping=0.5") == []
    assert rules.meant_to_fail("ds_config.clipping=auto") == []
    assert rules.meant_to_fail("ds_config.clipping=1.0") == ["parity"]


CLIPPING = {"fields": ["*.clipping", "A.max_norm"], "twice": ["1.0", "0.5"], "reason": "one number"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("A.clipping=1.0", "A.max_norm=0.5"), ("A.clipping=1.0", "A.max_norm=0.5")),
        (("A.clipping=auto", "A.clipping=1.0", "A.max_norm=0.5"), ("A.clipping=1.0", "A.max_norm=0.5")),
        (("A.clipping=0.5", "A.max_norm=0.5"), ()),
        (("A.clipping=auto", "A.max_norm=0.5"), ()),
        (("A.clipping=1.0", "A.decay=0.5"), ()),
        ((), ()),
    ],
)
def test_settings_that_say_the_same_contradict_each_other(
    settings: tuple[str, ...], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "rules", lambda: [CLIPPING, CLIPPING | {"fields": ["A.decay"]}])
    assert rules.contradiction(settings) == expected


def test_a_contradiction_has_a_reference_for_each_of_the_two_settings() -> None:
    json_norm = "ds_config.gradient_clipping=1.0"
    trainer_norm = "TrainingArguments.max_grad_norm=0.5"
    decay = "TrainingArguments.weight_decay=0.5"
    cell = Cell.of("zero2", "fp32", model="mlp", set=f"{json_norm}+{trainer_norm}+{decay}")
    scenario = CHECKS.get("parity").runs(cell, DRIVERS.get("trainer"))
    cells = {run.name: run.cell(cell) for run in scenario.runs}
    assert cells["train"] == cell
    assert cells["reference"].set == (json_norm, decay)
    assert cells["other_reference"].set == (trainer_norm, decay)


def test_what_is_excluded_keeps_the_reason_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    excluding = {"fields": ["A.flag"], "excluded": True, "reason": "it needs a GPU"}
    later = {"fields": ["A.*"], "checks": ["resume"], "reason": "concerns checkpoints"}
    monkeypatch.setattr(rules, "rules", lambda: [excluding, later])
    assert rules.rule_of("A.flag")["reason"] == "it needs a GPU"
    monkeypatch.setattr(rules, "rules", lambda: [excluding, later | {"excluded": False}])
    assert rules.rule_of("A.flag")["reason"] == "concerns checkpoints"


@pytest.mark.parametrize(
    "name", ["loss_scale", "hysteresis", "loss_scale_window", "min_loss_scale", "initial_scale_power"]
)
def test_settings_of_float16_are_swept_in_float16(name: str) -> None:
    field = Field(f"ds_config.fp16.{name}", "int", "1", ("0", "7"), ("zero2",), "fp32")
    setting = rules.ruled(field)
    # The values of a fixed factor come from its rule.
    assert setting.state == ("hinted" if name == "loss_scale" else "swept")
    assert setting.precision == "fp16_mixed"
    assert setting.checks == ("scaling",)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("TrainingArguments.local_rank", "launcher"),
        ("ds_config.activation_checkpointing.number_checkpoints", "contiguous memory"),
        ("ds_config.tensor_parallel.autotp_size", "option"),
        ("Accelerator.megatron_lm_plugin", "does not give"),
        ("ds_config.optimizer.legacy_fusion", "compiled"),
        ("load_checkpoint.custom_load_fn", "callable"),
    ],
)
def test_the_reason_of_an_exclusion_is_that_of_the_field(name: str, reason: str) -> None:
    setting = rules.ruled(Field(name, "str", "null", (), ("zero2",), "fp32"))
    assert setting.state == "excluded"
    assert reason in setting.reason


def asked_by(axis: str) -> bool:
    """Tell whether a cell can have this: a strategy, a precision, an option's value, or a setting; or a session the device."""
    name, _, value = axis.partition("=")
    if name == "device":
        return value in {"cpu", "cuda"}
    registries: dict[str, Any] = {"strategy": STRATEGIES, "precision": PRECISIONS}
    if name in registries:
        return value in registries[name].names()
    option = OPTIONS[name]
    return value in map(str, option.values) or option.accepts(value)


def test_what_is_excluded_for_an_axis_names_its_value() -> None:
    for rule in rules.rules():
        is_for_an_axis = re.search("option of a cell|axes of the matrix|chooses the", rule["reason"])
        if rule.get("excluded") and is_for_an_axis:
            assert rule.get("axis"), rule
        if "axis" in rule:
            assert asked_by(rule["axis"]), rule


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("ds_config.zero_optimization.stage", "strategy=zero3"),
        ("ds_config.fp16.enabled", "precision=fp16_mixed"),
        ("TrainingArguments.bf16", "precision=bf16_upcast"),
        ("FullyShardedDataParallelPlugin.activation_checkpointing", "activation_checkpointing=True"),
        ("FullyShardedDataParallel.sharding_strategy", "reshard_after_forward=False"),
        ("TrainingArguments.torch_compile_backend", "compile=aot_eager"),
        ("ds_config.torch_autocast.dtype", "set=ds_config.torch_autocast.enabled=true"),
    ],
)
def test_the_axis_of_an_exclusion_is_that_of_the_field(name: str, axis: str) -> None:
    rule = rules.rule_of(name)
    assert rule["excluded"]
    assert rule["axis"] == axis


def test_deepspeeds_autocast_is_swept_with_its_dtype() -> None:
    setting = rules.ruled(Field("ds_config.torch_autocast.enabled", "bool", "false", ("true",), ("zero2",), "fp32"))
    assert setting.state == "hinted"
    assert setting.values == (
        "true+ds_config.torch_autocast.dtype=bfloat16",
        "true+ds_config.torch_autocast.dtype=float16",
    )
    assert "resume" in setting.checks


def test_a_number_in_a_third_place_is_said_twice() -> None:
    names = ["ds_config.gradient_accumulation_steps", "DeepSpeedPlugin.gradient_accumulation_steps"]
    field = Field("GradientAccumulationPlugin.num_steps", "int", "null", ("1",), ("ddp", "zero2"), "fp32")
    setting = rules.ruled(field, names)
    assert setting.state == "excluded"
    assert setting.strategies == ("zero2",)
    for place in names:
        assert f"{place}=2+GradientAccumulationPlugin.num_steps=1" in setting.twice
    two = ("ds_config.gradient_accumulation_steps=2", "GradientAccumulationPlugin.num_steps=1")
    assert rules.contradiction(two) == two


def test_schedules_and_torchs_optimizers_of_the_json_are_swept() -> None:
    scheduler = rules.ruled(Field("ds_config.scheduler.type", "str", "null", (), ("zero2",), "fp32"))
    optimizer = rules.ruled(Field("ds_config.optimizer.type", "str", "null", (), ("zero2",), "fp32"))
    assert scheduler.state == "hinted"
    assert optimizer.state == "hinted"
    schedules = {value.partition("+")[0] for value in scheduler.values}
    assert schedules >= {"WarmupLR", "OneCycle"}
    assert any("torch_adam=true" in value for value in optimizer.values)


def test_a_variable_of_the_environment_stays_text() -> None:
    cell = Cell.of("fsdp2", "fp32", set="env.FSDP_VERSION=1+A.b=1")
    assert cell.settings("env") == {"FSDP_VERSION": "1"}
    assert DRIVERS.get("trainer").unsupported_reason(cell) == "the trainer driver has no A under fsdp2"


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("null", None), ("1e~08", 1e-8), ("b~c", "b-c"), ("(0.5,0.9)", [0.5, 0.9]), ("a.b", "a.b")],
)
def test_a_value_is_read_from_its_text(text: str, value: object) -> None:
    assert setting_value(text) == value


def test_a_text_may_be_an_import_path() -> None:
    assert setting_value("pathlib.Path") is Path


def test_a_cell_has_its_settings_in_its_id() -> None:
    cell = Cell.of("zero2", "fp32", set="ds_config.zero_optimization.overlap_comm=false+AdamW.eps=1e~08")
    assert Cell.parse(cell.id) == cell
    assert cell.settings("AdamW") == {"eps": 1e-8}
    assert cell.settings("Adam") == {}
    given = {"zero_optimization": {"stage": 2}}
    assert cell.with_settings("ds_config", given) == {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    assert given == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("wrong", ["flag", "A.b=", "A.b=a-b", "A.b=[1]", "=1"])
def test_what_is_no_setting_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="has no value"):
        Cell.of("ddp", "fp32", set=wrong)


def test_a_driver_says_which_objects_it_does_not_make() -> None:
    cell = Cell.of("ddp", "fp32", set="fully_shard.reshard_after_forward=2")
    assert DRIVERS.get("torch").unsupported_reason(cell) == "the torch driver has no fully_shard under ddp"


@pytest.mark.parametrize(
    ("setting", "is_made"),
    [
        ("TrainingArguments.load_best_model_at_end=true", True),
        ("TrainingArguments.load_best_model_at_end=true+TrainingArguments.save_total_limit=1", True),
        ("TrainingArguments.max_grad_norm=0.5", False),
    ],
)
def test_a_driver_may_set_some_fields_of_an_object_under_a_strategy(setting: str, *, is_made: bool) -> None:
    cell = Cell.of("zero3", "fp32", model="mlp", set=setting)
    reason = DRIVERS.get("trainer").unsupported_reason(cell)
    assert (reason is None) == is_made, reason


def test_of_an_object_only_the_fields_that_are_meant_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    source = Source("Plugin", f"{HERE}.Plugin", ("zero3",), only=("flag", "size"))
    names = [field.name for field in read_fields([source])]
    assert names == ["Plugin.flag", "Plugin.size"]


@pytest.mark.parametrize(
    ("setting", "strategy", "is_made"),
    [
        ("DeepSpeedPlugin.zero_stage=2", "zero2", True),
        ("DeepSpeedPlugin.zero_stage=2", "ddp", False),
        ("AutocastKwargs.enabled=true", "ddp", True),
        ("AutocastKwargs.enabled=true", "zero2", False),
        ("env.FSDP_VERSION=1", "fsdp2", True),
        ("env.FSDP_VERSION=1", "fsdp1", False),
        ("ds_config.gradient_clipping=1.0", "zero3", True),
        ("ds_config.gradient_clipping=1.0", "ddp", False),
    ],
)
def test_accelerates_objects_are_made_under_some_strategies(setting: str, strategy: str, *, is_made: bool) -> None:
    cell = Cell.of(strategy, "fp32", model="mlp", set=setting)
    reason = DRIVERS.get("accelerate").unsupported_reason(cell)
    assert (reason is None) == is_made, reason


@pytest.mark.parametrize(
    "followed",
    [
        "AdamW.eps=1.0",
        "SGD.nesterov=true",
        "ds_config.scheduler.params.gamma=0.5",
        "TrainingArguments.max_grad_norm=0.5",
    ],
)
def test_the_reference_follows_what_changes_the_training_and_nothing_else(followed: str) -> None:
    cell = Cell.of("ddp", "fp32", set=f"{followed}+DistributedDataParallel.static_graph=true")
    assert REFERENCE_RUN.cell(cell).set == (followed,)
    other = Cell.of("ddp", "fp32", set="ds_config.gradient_clipping_of_another_kind=1+AdamWithout.eps=1.0")
    assert REFERENCE_RUN.cell(other).set == ()
    compiled = Cell.of("ddp", "fp32", set="compile.fullgraph=true")
    assert REFERENCE_RUN.cell(compiled) == Cell("ddp", "fp32", 1)


CELL = Cell.of("ddp", "fp32", set="Plugin.flag=true")


def ended(action: str, message: str, kind: str = "raised") -> Trace:
    end = RunFailure(kind, f"rank 0 raised {message}", f"rank 0 raised {message}", action, 1)
    return Trace.of("torch", [RunTrace("train", 2, (), end, CELL.id)])


@pytest.mark.parametrize(
    ("action", "message", "kind", "status"),
    [
        ("build", "ValueError: flag is not supported", "raised", Status.REFUSED),
        ("build", "ValueError: ", "raised", Status.FAILED),
        ("build", "AttributeError: 'NoneType' object has no attribute 'x'", "raised", Status.FAILED),
        ("step", "ValueError: flag is not supported", "raised", Status.FAILED),
        ("build", "ValueError: flag", "hung", Status.HUNG),
    ],
)
def test_a_setting_is_refused_before_the_first_step_with_a_message(
    action: str, message: str, kind: str, status: Status
) -> None:
    trace = ended(action, message, kind)
    verdict = judge(CHECKS.get("names"), CELL, trace)
    assert verdict.status is status


def test_without_a_setting_nothing_may_be_refused() -> None:
    trace = ended("build", "ValueError: flag is not supported")
    verdict = judge(CHECKS.get("names"), Cell("ddp", "fp32"), trace)
    assert verdict.status is Status.FAILED


def test_rules_add_checks_and_leave_out_those_that_a_setting_is_meant_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    added = [
        {"fields": ["Plugin.*"], "checks": ["resume"], "reason": "concerns checkpoints"},
        {"fields": ["*.flag"], "without": ["parity"], "reason": "meant to"},
    ]
    monkeypatch.setattr(rules, "rules", lambda: added)
    left = left_out("sweep", {CELL: ["names", "resume", "parity", "export"]})
    assert set(left) == {(CELL, "parity"), (CELL, "export")}
    assert left[CELL, "parity"] == "meant to"


def test_a_field_without_values_and_rule_is_unknown() -> None:
    text = Field("Plugin.text", "str", "", (), ("ddp",), "fp32")
    path = Field("Plugin.nvme_path", "str", "", (), ("ddp",), "fp32")
    assert rules.ruled(text).state == "unknown"
    assert rules.ruled(path).state == "excluded"


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("TrainingArguments.past_index", "excluded"),
        ("TrainingArguments.adafactor", "excluded"),
        ("TrainingArguments.fp16_opt_level", "excluded"),
        ("ds_config.autotuning.metric", "excluded"),
        ("TrainingArguments.warmup_steps", "hinted"),
    ],
)
def test_rules_know_fields_of_older_releases(name: str, state: str) -> None:
    setting = rules.ruled(Field(name, "int", "0", ("1", "1000003"), ("ddp",), "fp32"))
    assert setting.state == state
    assert ("1000003" in setting.values) is False


def test_each_rule_is_whole() -> None:
    for rule in rules.rules():
        assert isinstance(rule["reason"], str)
        assert set(rule.get("without", ())) <= set(CHECKS.names())
        assert set(rule.get("checks", ())) <= set(CHECKS.names())
        assert set(rule.get("strategies", ())) <= set(STRATEGIES.names())


def test_sources_that_cannot_be_read_are_a_usage_problem() -> None:
    with pytest.raises(UsageProblem, match="No module named 'nowhere'"):
        rules.read((Source("X", "nowhere.X", ("ddp",)),))


def test_processes_of_a_session_read_the_libraries_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    field = Field("X.a", "bool", "", ("true",), ("ddp",), "fp32")
    answer = json.dumps([dataclasses.asdict(field)])
    source = Source("X", "a.X", ("ddp",))
    other_source = Source("Y", "a.Y", ("ddp",))

    def read(data: str) -> str:
        calls.append(data)
        return answer

    monkeypatch.setattr(rules, "_read", read)
    for _ in range(2):
        rules.read.cache_clear()  # as in another process
        assert rules.read((source,), tmp_path)[0].values == ("true",)
        assert rules.read((other_source,), tmp_path)
    assert len(calls) == 2


def test_a_library_that_is_not_installed_has_no_settings(monkeypatch: pytest.MonkeyPatch, fields: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert read_fields([Source("X", "deepspeed.X", ("zero2",))]) == []

    def json_of_without_deepspeed(_: Any) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'deepspeed'")

    monkeypatch.setitem(globals(), "json_of", json_of_without_deepspeed)
    for field in fields("Launched", becomes="json_of").values():
        assert field.places == ()


@pytest.mark.spawn
def test_torch_has_no_setting_that_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--driver", "torch"]) == 0
    shown = capsys.readouterr().out
    assert "fully_shard.reshard_after_forward" in shown
    assert " 0 unknown;" in shown


@pytest.mark.spawn
def test_the_listing_has_a_filter_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["settings", "--driver", "torch", "--state", "excluded"]) == 0
    header, *lines, counts = capsys.readouterr().out.splitlines()
    assert counts.startswith("torch: ")
    assert max(map(len, (header, *lines))) == 70
    states = {line.split()[1] for line in lines}
    assert states == {"excluded"}
    # By a part of the name, and by a pattern; in full.
    for name in ("delay_ALL_reduce", "Distributed*.delay_all*"):
        assert main(["settings", "--driver", "torch", name]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "DistributedDataParallel.delay_all_reduce_named_params: excluded",
            "    a callable, a collection or an object that no text spells; options",
            "    of a cell have some of them",
            "torch: 1 settings, 0 swept, 0 hinted, 1 excluded, 0 unknown; 0 cells",
        ]
    assert main(["settings", "--driver", "torch", "no_such_name"]) == 2
    assert "no setting of torch is named no_such_name" in capsys.readouterr().err


@pytest.mark.spawn
@pytest.mark.nightly
def test_the_installed_stack_has_no_setting_that_is_unknown_and_each_rule_a_setting() -> None:
    names: set[str] = set()
    unknown = []
    distinct = set()
    for driver in DRIVERS.names():
        for field in rules.settings_of(rules.sources_of(DRIVERS.get(driver))):
            names.add(field.name)
            names.update(names_beside(field))
            distinct.add(json.dumps(dataclasses.asdict(field)))
            if field.state == "unknown":
                unknown.append(field.name)
    assert unknown == []
    unused = []
    for rule in rules.rules():
        if rule.get("older"):
            continue
        for pattern in rule["fields"]:
            if not fnmatch.filter(names, pattern):
                unused.append(pattern)
    assert unused == []
    assert len(distinct) > 400


def names_beside(field: Setting) -> set[str]:
    """Return the settings that say the same as this field in other places."""
    names = set()
    for text in field.twice:
        for part in text.split("+"):
            names.add(part.partition("=")[0])
    return names


def has_exactly(row: tuple[str, ...], set_to: dict[str, str]) -> bool:
    """Tell whether a row has these values, and nothing for a name whose value is empty."""
    for name, value in set_to.items():
        if value and f"{name}={value}" not in row:
            return False
        if not value and any(setting.startswith(f"{name}=") for setting in row):
            return False
    return True


def test_rows_have_every_pair_of_values() -> None:
    values = {"A.x": ["1"], "A.y": ["1", "2"], "B.z": ["1"]}
    rows = covering_rows(values)
    for (name, name_values), (other, other_values) in itertools.combinations(values.items(), 2):
        for value, other_value in itertools.product((*name_values, ""), (*other_values, "")):
            set_to = {name: value, other: other_value}
            matching = [row for row in rows if has_exactly(row, set_to)]
            assert matching, set_to


@given(st.sets(st.integers(0, 20), min_size=1, max_size=4))
def test_a_row_is_reduced_to_what_fails(guilty: set[int]) -> None:
    row = tuple(f"A.f{number}=1" for number in range(21))
    expected = tuple(row[number] for number in sorted(guilty))
    asked: list[tuple[str, ...]] = []

    def fails(candidate: tuple[str, ...]) -> bool:
        asked.append(candidate)
        return set(expected) <= set(candidate)

    assert smallest(row, fails) == expected
    assert len(asked) < 120


def test_a_refusal_does_not_hide_another_failure() -> None:
    def outcome(row: tuple[str, ...]) -> str:
        if {"A.a=1", "A.b=1"} <= set(row):
            return "refused"
        if {"A.c=1", "A.d=1"} <= set(row):
            return "parity: failed"
        return ""

    row = ("A.a=1", "A.b=1", "A.c=1", "A.d=1", "A.e=1")
    assert list(reduced_failures(row, outcome)) == [
        (("A.a=1", "A.b=1"), "refused"),
        (("A.c=1", "A.d=1"), "parity: failed"),
    ]


def test_a_row_is_tried_without_what_an_earlier_row_had() -> None:
    asked: list[tuple[str, ...]] = []

    def outcome(row: tuple[str, ...]) -> str:
        asked.append(row)
        return "refused" if {"A.a=1", "A.b=1"} <= set(row) else ""

    row = ("A.a=1", "A.b=1", "A.c=1")
    earlier = [("A.a=1", "A.b=1"), ("A.c=1", "A.d=1")]
    assert list(reduced_failures(row, outcome, earlier)) == []
    assert asked == [("A.a=1", "A.c=1")]


def test_a_failure_is_the_same_on_another_rank_and_with_other_numbers() -> None:
    def outcome(row: tuple[str, ...]) -> str:
        if {"A.b=1", "A.d=1"} <= set(row):
            return f"parity: failed: rank {len(row) % 2} is {len(row)}.5e-03 off"
        return ""

    row = ("A.a=1", "A.b=1", "A.c=1", "A.d=1", "A.e=1")
    parts = [part for part, _ in reduced_failures(row, outcome)]
    assert parts == [("A.b=1", "A.d=1")]


def test_a_known_bug_of_a_setting_covers_it_among_others() -> None:
    known = fails("resume", reason="a bug", set="A.b=1")
    assert known.covers(Cell.of("ddp", "fp32", set="A.b=1+A.c=2"), "resume")
    assert not known.covers(Cell.of("ddp", "fp32", set="A.b=11"), "resume")
    assert not known.covers(Cell("ddp", "fp32"), "resume")


CHECKS_OF_CHECKPOINTS = ("resume", "export", "reshard", "portable", "damage")


def test_a_setting_of_checkpoints_gets_every_check_of_checkpoints() -> None:
    driver = DRIVERS.get("deepspeed")
    read = Cell.of("zero2", "fp32", model="mlp", set="ds_config.checkpoint.tag_validation=Warn")
    other = Cell.of("zero2", "fp32", model="mlp", set="ds_config.zero_optimization.overlap_comm=true")
    settings = "+".join((*read.set, *other.set))
    both = Cell.of("zero2", "fp32", model="mlp", set=settings)
    for name in ("reshard", "damage"):
        check = CHECKS.get(name)
        assert check.not_applicable(read, driver) is None
        assert check.not_applicable(other, driver) is not None
        assert check.not_applicable(both, driver) is not None
    left = left_out("sweep", {read: CHECKS_OF_CHECKPOINTS, other: CHECKS_OF_CHECKPOINTS})
    cells_left = {cell for cell, _ in left}
    assert cells_left == {other}


def test_the_default_profile_leaves_costly_checks_of_its_slice_to_the_sweep() -> None:
    cell = Cell.parse("zero2-fp32-w2-model_mlp-set_ds_config.checkpoint.checkpoint_serialization=false")
    assert cell.id in SLICE["deepspeed"]
    left = left_out("default", {cell: CHECKS_OF_CHECKPOINTS})
    checks_left = {name for _, name in left}
    assert checks_left == {"reshard", "portable", "damage"}

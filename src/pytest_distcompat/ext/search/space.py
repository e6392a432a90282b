"""Which candidates a search may try, and how it draws them at random.

``distcompat search`` looks for branches of the *stack* (torch and the libraries above it) that no
test executes. It tries *candidates*: a cell of a driver, and perhaps calls of the live trainer. A
driver is the class by which a trainer is tested. A cell is one point of the test matrix, with
options and settings: ``fsdp2-fp32-w2-model_mlp-set_AdamW.eps=0.5`` has the option ``model`` and the
setting ``AdamW.eps=0.5``, a field of an object of a library. A call is a method of the trainer,
``export(max_shard_size=7)``.

``guide.Search`` holds a ``DriverSpace`` for each driver and asks it for a candidate: drawn from
nothing (``fresh``), or a ``neighbour`` of one that has reached new branches, with another strategy,
option, setting or call. What is drawn may not go together, such as an option that the strategy does
not have. Then the result is None, and the caller draws again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from pytest_distcompat.calls import Call, offered, refusal_reason
from pytest_distcompat.cell import OPTIONS, Cell, OptionValue
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver, unsupported_reason
from pytest_distcompat.ext.search.arguments import call_arguments
from pytest_distcompat.ext.search.candidate import Candidate
from pytest_distcompat.ext.search.yields import Yields
from pytest_distcompat.ext.upstream.sweep.rules import Setting, settings_of, sources_of
from pytest_distcompat.ext.walk.explore import known_failures, matches_any
from pytest_distcompat.ext.walk.sequence import allowed
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.profiles import cell_of, option_choices
from pytest_distcompat.scenario import FOLLOWED

T = TypeVar("T")
#: Option of a cell -> its value: ``{"model": "mlp", "set": "AdamW.eps=0.5"}``. ``set`` has all
#: settings, joined by ``+``.
_Options = dict[str, OptionValue]
#: The most ranks of a candidate's cell.
MOST_RANKS = 4
#: The most calls of a candidate. Each costs time, and a failure after few calls is easier to read.
MOST_CALLS = 5
#: Options that a cell with calls may have. Calls are compared with the same calls in one process,
#: and other options change what a step is.
_OPTIONS_OF_CALLS = frozenset(
    {
        "model",
        "compile",
        "activation_checkpointing",
        "state_dict",
        "use_orig_params",
        "reshard_after_forward",
        "dp_replicate",
        "cpu_offload",
        "set",
    }
)
#: Settings that are not tried, since DeepSpeed then compiles an operator for minutes in each run.
_COMPILED = frozenset({"ds_config.zero_force_ds_cpu_optimizer"})
#: What a candidate has that is drawn from nothing: calls, a setting, or options alone. Each is
#: drawn as often as it is in this tuple.
_KINDS = ("calls", "calls", "setting", "setting", "setting", "option")
#: The probability that an optional argument of a call is given.
_ARGUMENT_GIVEN = 0.7


class DriverSpace:
    """All candidates of a driver, to draw from.

    Args:
        driver: The driver's name: ``accelerate``.
        strategies: The strategies to search under: ``("fsdp2", "zero3")``. Those that the driver
            does not support are left out.
        shared: A directory in which several processes share the list of settings; reading it from
            the libraries takes time. None to read it anew.

    Attributes:
        driver: The driver's name.
        kind: The driver's class.
        settings: The settings of the driver's libraries that can be tried.
        strategies: The strategies that the driver supports.
        choices: (option, value) of each value that an option may have, other than the default.
        calls: The calls that the live trainer offers, with possible arguments; empty if the driver
            has none.
    """

    def __init__(self, driver: str, strategies: Iterable[str], shared: Path | None = None) -> None:
        self.driver = driver
        self.kind: type[Driver] = find_driver(driver)
        self.settings: list[Setting] = []
        for setting in settings_of(sources_of(self.kind), shared):
            if setting.cells and setting.name not in _COMPILED:
                self.settings.append(setting)
        self.strategies: list[str] = []
        for strategy in strategies:
            if self._can_run(Cell(strategy, "fp32")):
                self.strategies.append(strategy)
        self.choices = [choice for choice in option_choices(self.kind) if choice is not None]
        self.calls: list[Call] = []
        if self.kind.live_calls is not None:
            self.calls = offered(self.kind.live_calls)

    def _can_run(self, cell: Cell) -> bool:
        """Tell whether the driver can run a cell on CPU ranks."""
        return unsupported_reason(self.kind, cell, "cpu") is None

    def sound(self, candidate: Candidate) -> bool:
        """Tell whether a candidate can be run, so that a failure says something about the stack."""
        cell = candidate.cell
        # On a busy machine inductor's compiler takes longer than a run may.
        too_slow = cell.world_size > MOST_RANKS or cell.option("compile") is True
        if too_slow or not self._can_run(cell):
            return False
        if not candidate.calls:
            return True
        return self._compares_calls(cell) and self._callable(candidate.calls, cell.strategy)

    def _compares_calls(self, cell: Cell) -> bool:
        """Tell whether calls in a cell can be compared with the same calls in one process."""
        if self.kind.live_calls is None:
            return False
        if cell.option("model") != "mlp" or cell.precision != "fp32":
            return False
        for name, _ in cell.options:
            if name not in _OPTIONS_OF_CALLS:
                return False
        # The one process of the comparison gets no settings, so those that change a training
        # (``FOLLOWED``) must not be set.
        return not any(setting.startswith(FOLLOWED) for setting in cell.set)

    def _callable(self, calls: Sequence[Call], strategy: str) -> bool:
        """Tell whether these calls can be made in this order.

        Each call may follow those before it. None is one that the trainer refuses under the
        strategy. The calls are not known to fail, by a known issue.
        """
        kind = self.kind.live_calls
        assert kind is not None
        if len(calls) > MOST_CALLS:
            return False
        if matches_any(known_failures(self.kind, strategy), calls):
            return False
        for number, call in enumerate(calls):
            if refusal_reason(call, kind, strategy):
                return False
            if not allowed(calls[:number], call, kind.own):
                return False
        return True

    def fresh(self, random: Random, yields: Yields) -> Candidate | None:
        """Return a candidate from nothing, with a few calls, a setting, or one or two options.

        Args:
            random: The source of random numbers.
            yields: The weights of options, settings and calls. What has led to new branches has
                more weight.

        Returns:
            The candidate; None if what was drawn does not go together.
        """
        kind = random.choice(_KINDS)
        strategy = random.choice(self.strategies)
        if kind == "calls" and self.calls:
            calls: list[Call] = []
            for _ in range(random.randint(1, 3)):
                calls.append(self._call(random, yields))
            cell = self._cell(strategy, "fp32", {"model": "mlp"})
            return self._made(cell, calls)
        if kind == "setting":
            return self._made(self._with_setting(strategy, random, yields), ())
        options: _Options = {}
        for _ in range(random.randint(1, 2)):
            name, value = self._choice(random, yields)
            options[name] = value
        precision = random.choice(("fp32", "bf16_upcast", "bf16_pure"))
        return self._made(self._cell(strategy, precision, options), ())

    def neighbour(
        self, candidate: Candidate, others: Sequence[Candidate], random: Random, yields: Yields
    ) -> Candidate | None:
        """Return a candidate that differs in one thing from a given one, or that joins two.

        Args:
            candidate: The given candidate.
            others: All candidates that have reached new branches. One of them may be joined with
                the given one.
            random: The source of random numbers.
            yields: The weights of options, settings and calls.

        Returns:
            The candidate; None if what was drawn does not go together.
        """
        # Each move is drawn as often as it is in the list.
        moves = [self._other_strategy, self._other_option, self._other_setting, self._other_setting]
        if candidate.calls:
            moves += [self._other_calls] * 4
        elif self.calls and candidate.cell.precision == "fp32":
            moves.append(self._other_calls)
        same_driver: list[Candidate] = []
        for other in others:
            if other.driver == self.driver and other != candidate:
                same_driver.append(other)
        if same_driver and random.random() < 0.2:
            return self._joined(candidate, random.choice(same_driver))
        return random.choice(moves)(candidate, random, yields)

    def _made(self, cell: Cell | None, calls: Sequence[Call]) -> Candidate | None:
        """Return the candidate of a cell and calls.

        The result is None without a cell, or if the candidate cannot be run.
        """
        if cell is None:
            return None
        candidate = Candidate(self.driver, cell, tuple(calls))
        if not self.sound(candidate):
            return None
        return candidate

    def _cell(self, strategy: str, precision: str, options: _Options) -> Cell | None:
        """Return the cell with these options, the options that they need, and enough ranks.

        It has two ranks, or more if the options need more. The result is None if there is no such
        cell.
        """
        chosen = dict(options)
        if chosen.get("set"):
            # Sorted, so that the same settings are one candidate.
            settings = sorted(str(chosen["set"]).split("+"))
            chosen["set"] = "+".join(settings)
        try:
            return cell_of(self.kind, strategy, precision, 2, *chosen.items())
        except UsageProblem:
            return None

    def _with_setting(
        self,
        strategy: str,
        random: Random,
        yields: Yields,
        options: _Options | None = None,
    ) -> Cell | None:
        """Draw a setting, and return a cell with it; None if there is none that goes together.

        The cell is that in which the profile ``sweep``, which tries each setting once, would run
        the setting. It also has the given options.
        """
        possible: list[Setting] = []
        weights: list[float] = []
        for setting in self.settings:
            if _is_read_under(setting, strategy):
                possible.append(setting)
                weights.append(yields.of_setting(setting.name))
        if not possible:
            return None
        setting = _weighted(random, possible, weights)
        # ``cells`` has a text for each value to try: ``AdamW.eps=0.5``.
        text = random.choice(setting.cells)
        chosen: _Options = {**(options or {}), **setting.options}
        if "model" in self.kind.options:
            chosen.setdefault("model", "mlp")
        if "optimizer" not in self.kind.options:
            chosen.pop("optimizer", None)
        chosen["set"] = _with_settings(str(chosen.get("set", "")), text)
        return self._cell(strategy, setting.precision, chosen)

    def _choice(self, random: Random, yields: Yields) -> tuple[str, OptionValue]:
        """Draw an option, then one of its values; return both."""
        names = list(OPTIONS)
        weights = [self._option_weight(name, yields) for name in names]
        option = _weighted(random, names, weights)
        choices = [choice for choice in self.choices if choice[0] == option]
        return random.choice(choices)

    def _option_weight(self, name: str, yields: Yields) -> float:
        """Return the weight of an option; 0 if the driver does not support it."""
        for supported_name, _ in self.choices:
            if supported_name == name:
                return yields.of_option(name)
        return 0.0

    def _call(self, random: Random, yields: Yields) -> Call:
        """Draw a call: a method of the live trainer, then its arguments.

        Beside its own arguments a call may have those of the library's public method that it calls,
        such as ``max_shard_size`` of ``save_model``.
        """
        kind = self.kind.live_calls
        assert kind is not None
        names = list(dict.fromkeys(call.name for call in self.calls))
        weights = [yields.of_call(name) for name in names]
        name = _weighted(random, names, weights)
        calls = [call for call in self.calls if call.name == name]
        call = random.choice(calls)
        arguments = dict(call.arguments)
        for argument in call_arguments(kind, name):
            if random.random() < _ARGUMENT_GIVEN:
                arguments[argument.name] = random.choice(argument.values)
        return Call(name, tuple(arguments.items()))

    def _other_strategy(
        self, candidate: Candidate, random: Random, yields: Yields
    ) -> Candidate | None:
        """Return the candidate under another strategy; None if a setting means nothing there."""
        del yields  # all moves have the same parameters
        strategy = random.choice(self.strategies)
        cell = candidate.cell
        names = {setting.partition("=")[0] for setting in cell.set}
        for setting in self.settings:
            if setting.name in names and not _is_read_under(setting, strategy):
                return None
        changed = self._cell(strategy, cell.precision, dict(cell.options))
        return self._made(changed, candidate.calls)

    def _other_option(
        self, candidate: Candidate, random: Random, yields: Yields
    ) -> Candidate | None:
        """Return the candidate with an option added, changed or removed."""
        cell = candidate.cell
        options = dict(cell.options)
        name, value = self._choice(random, yields)
        if name in options and random.random() < 0.5:
            del options[name]
        else:
            options[name] = value
        changed = self._cell(cell.strategy, cell.precision, options)
        return self._made(changed, candidate.calls)

    def _other_setting(
        self, candidate: Candidate, random: Random, yields: Yields
    ) -> Candidate | None:
        """Return the candidate with a setting added, or with another value of one."""
        cell = candidate.cell
        changed = self._with_setting(cell.strategy, random, yields, dict(cell.options))
        return self._made(changed, candidate.calls)

    def _other_calls(
        self, candidate: Candidate, random: Random, yields: Yields
    ) -> Candidate | None:
        """Return the candidate with a call added, or with one that has other arguments."""
        calls = list(candidate.calls)
        place = random.randint(0, len(calls))
        if place < len(calls) and random.random() < 0.5:
            # The same method with other arguments.
            calls[place] = self._call_named(calls[place].name, random)
        else:
            calls.insert(place, self._call(random, yields))
        cell = candidate.cell
        # Calls are compared with one process on this model only.
        options = {**dict(cell.options), "model": "mlp"}
        changed = self._cell(cell.strategy, cell.precision, options)
        return self._made(changed, calls)

    def _call_named(self, name: str, random: Random) -> Call:
        """Return a call of that method with drawn arguments: draw calls until one is of it."""
        equal_weights = Yields()
        for _ in range(100):
            call = self._call(random, equal_weights)
            if call.name == name:
                return call
        return Call(name)

    def _joined(self, candidate: Candidate, other: Candidate) -> Candidate | None:
        """Return a candidate with the options and settings of both, and the calls of one.

        The calls are those of ``candidate``, or of ``other`` if that has none. Where both have an
        option, the value of ``candidate`` counts.
        """
        cell = candidate.cell
        settings = dict.fromkeys((*cell.set, *other.cell.set))
        options: _Options = {**dict(other.cell.options), **dict(cell.options)}
        if settings:
            options["set"] = "+".join(settings)
        joined = self._cell(cell.strategy, cell.precision, options)
        return self._made(joined, candidate.calls or other.calls)


def _with_settings(text: str, added: str) -> str:
    """Return settings with others added, which replace those of the same name.

    Args:
        text: Settings, joined by ``+``: ``AdamW.eps=0.5+AdamW.amsgrad=true``. It may be empty.
        added: The settings to add, in the same form.
    """
    replaced = {setting.partition("=")[0] for setting in added.split("+")}
    kept: list[str] = []
    for setting in text.split("+"):
        if setting and setting.partition("=")[0] not in replaced:
            kept.append(setting)
    return "+".join([*kept, added])


def _is_read_under(setting: Setting, strategy: str) -> bool:
    """Tell whether a setting means something under a strategy.

    ``setting.strategies`` are the strategies under which the profile ``sweep`` tries it. One that
    is tried under a stage of ZeRO means something under all stages.
    """
    if strategy in setting.strategies:
        return True
    if not strategy.startswith("zero"):
        return False
    return any(name.startswith("zero") for name in setting.strategies)


def _weighted(random: Random, items: Sequence[T], weights: Sequence[float]) -> T:
    """Draw an item, as often as its weight says."""
    return random.choices(items, weights)[0]

"""The search itself, a coverage-guided fuzzer.

It decides which candidate is tried next, what is kept of it, and how a failure is reduced.

A *candidate* is a cell of a driver (``torch fsdp2-fp32-w2-model_mlp``), perhaps with calls of the
live trainer. A candidate that reaches branches of the installed libraries that none has reached
before is *kept*. About half of the candidates are drawn from all that are possible. The others are
*neighbours* of kept ones, which differ in an option, a setting or a call. A *yield* is what an
option, setting or call has brought so far: those that brought many new branches are drawn more
often (``yields``).

``command`` calls ``Search.run`` with a function that runs and judges a candidate
(``trial.Trials.run``), and prints each ``Step`` that it yields. The *law* is that all checks pass,
that calls do what they do in one process, or that the libraries refuse the candidate by an
exception. A candidate that breaks it is reduced to the parts that it needs to fail: of
``fsdp2-fp32-w2-model_mlp-lora`` perhaps only ``fsdp2-fp32-w2-lora`` remains. The result, with the
text of the failure (``problem``), is a *finding*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from pytest_distcompat.ext.search.candidate import Candidate
from pytest_distcompat.ext.search.reached import Branches
from pytest_distcompat.ext.search.space import DriverSpace
from pytest_distcompat.ext.search.state import Found, Kept, State, cause_of
from pytest_distcompat.ext.search.trial import Outcome
from pytest_distcompat.ext.search.yields import Yields
from pytest_distcompat.ext.upstream.sweep.pairs import smallest

#: The fraction of candidates that are drawn from all; the others vary kept ones.
_FRESH = 0.5
#: If so many draws in a row give no untried candidate, the search ends.
_DRAWS = 2000
#: The most trials that the reduction of one failure takes.
_REDUCTION_TRIALS = 24
#: ``Kept.barren`` of a kept candidate that the libraries refused: it is varied as rarely as one of
#: which 20 neighbours reached nothing new.
_BARREN_IF_REFUSED = 20

#: Runs a candidate and judges it.
Try = Callable[[Candidate], Outcome]


@dataclass(frozen=True)
class Step:
    """A candidate that was tried, and what came of it.

    Attributes:
        candidate: The candidate.
        outcome: What came of it: the ``branches`` that it reached, ``problem``, how it breaks the
            law (empty if it does not), and ``refused``, why the libraries refuse it.
        new_branches: How many branches it was the first to reach.
        found: The finding that it belongs to; None if it does not break the law.
    """

    candidate: Candidate
    outcome: Outcome
    new_branches: int
    found: Found | None


class Search:
    """A search: it draws, tries and keeps candidates.

    Args:
        spaces: The candidates of each driver. A space draws them (``fresh``, ``neighbour``) and
            tells whether one can be run (``sound``).
        state: What was tried before. Each trial is added to it.
        known: The branches that are not new: those that the cells of a map reach, a record of what
            the cells of the tests execute. What trials reach is added.
        functions: Returns the functions that have some branches, those with most branches first:
            ``torchao/optim/adam.py _AdamBase.step: 11``.
        readers: Name, ``eps`` say -> how many branches that no cell reaches have it in their
            condition. A setting whose field has such a name is drawn more often.
        guided: Whether neighbours of kept candidates are tried. If not, all candidates are drawn
            with equal weights, for comparison.
    """

    def __init__(
        self,
        spaces: Sequence[DriverSpace],
        state: State,
        known: Branches,
        functions: Callable[[Branches], Iterator[str]],
        *,
        readers: Mapping[str, int] | None = None,
        guided: bool = True,
    ) -> None:
        self.state = state
        self.known = known
        self.guided = guided
        self._functions = functions
        self._spaces = {space.driver: space for space in spaces}
        self._yields = Yields()
        if guided:
            self._yields = state.yields(readers or {})
        # Those of a state that goes on are not new.
        known.add(state.new_branches)

    def run(self, first: Sequence[Candidate], attempt: Try) -> Iterator[Step]:
        """Yield a step for each candidate: first for the given ones, then for drawn ones.

        It ends when no candidate is left; the caller may stop before.

        Args:
            first: Candidates to begin with, such as those of a corpus.
            attempt: Runs a candidate and judges it.
        """
        for candidate in first:
            if str(candidate) not in self.state.tried and self._is_ours(candidate):
                yield self._tried(candidate, None, attempt)
        while True:
            drawn = self._draw()
            if drawn is None:
                return
            candidate, parent = drawn
            yield self._tried(candidate, parent, attempt)

    def _is_ours(self, candidate: Candidate) -> bool:
        """Tell whether a candidate of a corpus is one that this search may try."""
        space = self._spaces.get(candidate.driver)
        if space is None or candidate.cell.strategy not in space.strategies:
            return False
        return space.sound(candidate)

    def _draw(self) -> tuple[Candidate, Kept | None] | None:
        """Return an untried candidate, and the kept one that it is a neighbour of (or None).

        The result is None if no candidate is left.
        """
        # The seed of each draw has the number of candidates tried, so that a search that goes on
        # from a file draws as one that never stopped.
        state = self.state
        random = Random(f"{state.seed} {state.shard} {len(state.tried)}")  # noqa: S311 - no secret
        spaces = list(self._spaces.values())
        for _ in range(_DRAWS):
            parent = None
            if self.guided and state.kept and random.random() >= _FRESH:
                parent = self._parent(random)
                space = self._spaces[parent.candidate.driver]
                others = [kept.candidate for kept in state.kept]
                candidate = space.neighbour(parent.candidate, others, random, self._yields)
            else:
                candidate = random.choice(spaces).fresh(random, self._yields)
            if candidate is not None and str(candidate) not in state.tried:
                return candidate, parent
        return None

    def _parent(self, random: Random) -> Kept:
        """Draw a kept candidate to vary.

        One that reached many new branches is drawn more often, and one of which many neighbours in
        a row have reached nothing new is drawn more rarely.
        """
        choices: list[Kept] = []
        weights: list[float] = []
        for kept in self.state.kept:
            if kept.candidate.driver in self._spaces:
                choices.append(kept)
                weights.append(len(kept.branches) ** 0.5 / (1 + kept.barren))
        return random.choices(choices, weights)[0]

    def _tried(self, candidate: Candidate, parent: Kept | None, attempt: Try) -> Step:
        """Try a candidate, and add what came of it to the state.

        Args:
            candidate: The candidate.
            parent: The kept candidate that it is a neighbour of; None if it was drawn from all.
            attempt: Runs it and judges it.
        """
        outcome = attempt(candidate)
        new = outcome.branches.without(self.known)
        self.known.add(new)
        # The state has each candidate with the number of its new branches, and sums over all: of
        # seconds, and of candidates that were refused.
        self.state.tried[str(candidate)] = len(new)
        self.state.seconds += outcome.seconds
        self.state.refused += bool(outcome.refused)
        if self.guided:
            self._yields.add(candidate, len(new))
        if parent is not None:
            # How many of its neighbours in a row have reached nothing new.
            parent.barren = 0 if len(new) else parent.barren + 1
        if len(new):
            functions = tuple(self._functions(new))
            kept = Kept(candidate, new, functions[:3])
            if outcome.refused:
                # Its neighbours are mostly refused too.
                kept.barren = _BARREN_IF_REFUSED
            self.state.kept.append(kept)
        finding: Found | None = None
        if outcome.problem:
            finding = self._finding(candidate, outcome, attempt)
        return Step(candidate, outcome, len(new), finding)

    def _finding(self, candidate: Candidate, outcome: Outcome, attempt: Try) -> Found:
        """Return the finding that a candidate belongs to, which breaks the law.

        A failure of a new cause is a new finding, whose candidate is reduced. Another failure of a
        known cause is only counted.
        """
        # The text without what differs between failures of one cause, such as numbers.
        cause = cause_of(outcome.problem)
        known_finding = self.state.finding(cause)
        if known_finding is not None:
            known_finding.times += 1
            return known_finding
        reduced = self._reduced(candidate, cause, attempt)
        finding = Found(reduced, outcome.problem)
        self.state.found.append(finding)
        return finding

    def _reduced(self, candidate: Candidate, cause: str, attempt: Try) -> Candidate:
        """Return the smallest part of a candidate that fails for the same cause.

        ``smallest`` takes away halves of its parts (options, settings, calls and their arguments),
        then quarters, and so on, as long as the rest still fails.
        """
        space = self._spaces[candidate.driver]
        trials = 0

        def fails_alike(parts: tuple[str, ...]) -> bool:
            """Try the candidate with these parts only; tell whether it fails for that cause."""
            nonlocal trials
            part = candidate.only(parts)
            # Without calls it would be a candidate of another kind, judged in another way.
            lost_all_calls = bool(candidate.calls) and not part.calls
            if lost_all_calls or trials >= _REDUCTION_TRIALS or not space.sound(part):
                return False
            trials += 1
            outcome = attempt(part)
            self.state.seconds += outcome.seconds
            return cause_of(outcome.problem) == cause

        return candidate.only(smallest(candidate.parts, fails_alike))

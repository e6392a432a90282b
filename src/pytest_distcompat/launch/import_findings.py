"""Findings about what the user's modules did at their import, by the tests that they concern.

A finding is a sentence: ``/repo/test_a.py:3 reads RANK at import``. Ranks that are forked from a
process which has imported that module would all have the same value of ``RANK``, so they must
import it themselves. ``at_import.Watch`` adds the findings in a fork server (the process from which
ranks are forked). They are sent to pytest's process as JSON, where ``launcher_process`` asks for
the ``reason`` before it starts ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

#: Stands in place of a file for a finding that concerns every test.
EVERY_TEST = ""


@dataclass
class Findings:
    """What modules read or created at import.

    Attributes:
        found: First by the name of the environment variable that was read ("" for everything else),
            then by the file of the test module that the finding concerns (or ``EVERY_TEST``): the
            first such finding, as a sentence. For example
            ``{"": {}, "RANK": {"/repo/test_a.py": "/repo/test_a.py:3 reads RANK at import"}}``.
    """

    found: dict[str, dict[str, str]] = field(default_factory=lambda: {"": {}})

    def add(self, sentence: str, file: str, variable: str = "") -> None:
        """Add a finding, unless there is one on the same variable and file."""
        self.found.setdefault(variable, {}).setdefault(file, sentence)

    def reason(self, file: str | None, differs: Callable[[str], bool]) -> str:
        """Return why ranks must not share what was imported; empty if they may.

        Args:
            file: The test module whose tests the ranks run; None if it may be any.
            differs: Tells whether the ranks have another value of an environment variable than the
                process that imported the modules.
        """
        for variable, sentence_by_file in self.found.items():
            for test_file, sentence in sentence_by_file.items():
                is_relevant = file is None or test_file in {EVERY_TEST, file}
                if is_relevant and (not variable or differs(variable)):
                    return sentence
        return ""

    def join(self, other: Findings) -> None:
        """Add the findings of another process that imported the same modules.

        Two processes import them, and ranks are forked from both in turn (``forking``).
        """
        for variable, sentence_by_file in other.found.items():
            # If both processes have a finding on the same file, that of this one stays.
            self.found[variable] = {**sentence_by_file, **self.found.get(variable, {})}

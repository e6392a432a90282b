"""Tests for torch's own harness, as source text: what the benchmarks compare ours with."""

from __future__ import annotations

_TESTS = """
from torch import distributed
from torch.testing._internal import common_distributed
{before}

class TestBody(common_distributed.MultiProcessTestCase):
    @property
    def world_size(self):
        return RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def start(self):
        store = distributed.FileStore(self.file_name, RANKS)
        distributed.init_process_group("BACKEND", store=store, rank=self.rank, world_size=RANKS)
        {call}
        distributed.destroy_process_group()

for number in range({count}):
    setattr(TestBody, f"test_{{number}}", lambda self: self.start())
    getattr(TestBody, f"test_{{number}}").__name__ = f"test_{{number}}"
"""


def multi_process(
    before: str, call: str, count: str = "{count}", backend: str = "gloo", ranks: int = 2
) -> str:
    """A module with ``count`` tests in a ``MultiProcessTestCase``, each of which makes that call in a group of so many ranks.

    ``before`` stands above the class. All three may hold fields for ``str.format``, which the result is meant for.
    """
    text = (
        _TESTS.replace("RANKS", str(ranks))
        .replace("BACKEND", backend)
        .replace("{before}", before)
        .replace("{call}", call)
    )
    return text.replace("{count}", count)

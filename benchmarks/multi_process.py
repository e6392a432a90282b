"""Tests for torch's own harness, as source text: what the benchmarks compare ours with."""

from __future__ import annotations

_TESTS = """
from torch import distributed
from torch.testing._internal import common_distributed
{before}

class TestBody(common_distributed.MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def start(self):
        store = distributed.FileStore(self.file_name, 2)
        distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        {call}
        distributed.destroy_process_group()

for number in range({count}):
    setattr(TestBody, f"test_{{number}}", lambda self: self.start())
    getattr(TestBody, f"test_{{number}}").__name__ = f"test_{{number}}"
"""


def multi_process(before: str, call: str, count: str = "{count}") -> str:
    """A module with ``count`` tests in a ``MultiProcessTestCase``, each of which makes that call in a gloo group of 2 ranks.

    ``before`` stands above the class. All three may hold fields for ``str.format``, which the result is meant for.
    """
    text = _TESTS.replace("{before}", before).replace("{call}", call)
    return text.replace("{count}", count)

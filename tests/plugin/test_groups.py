"""``--dist loadgroup``: the name of a group that xdist puts behind a node id in its workers is no part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_distcompat.ext.reuse.keeper import RankKeeper
from pytest_distcompat.ext.reuse.reused_ranks import Reuse
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.request import Request
from pytest_distcompat.plugin.selection import strip_group

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks


class Config:
    """Of which only these options are asked."""

    def __init__(self, **options: object) -> None:
        self._options = options

    def getoption(self, name: str, default: object) -> object:
        return self._options.get(name, default)


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("test_m.py::test_marked@one", "test_m.py::test_marked"),
        ("test_m.py::TestX::test[a-b]@one", "test_m.py::TestX::test[a-b]"),
        ("test_m.py::test[a@b]@one", "test_m.py::test[a@b]"),
        ("test_m.py::test[a::b@c]", "test_m.py::test[a::b@c]"),
        ("test_m.py::test@a[b]", "test_m.py::test"),
        ("test_m.py::test@one_two@three", "test_m.py::test"),
        ("of@me/test_m.py::test", "of@me/test_m.py::test"),
        ("of@me/test_m.py", "of@me/test_m.py"),
    ],
)
def test_only_the_groups_name_is_cut(nodeid: str, expected: str) -> None:
    for options in ({"dist": "loadgroup"}, {"dist": "no", "loadgroup": True}):
        assert strip_group(cast("pytest.Config", Config(**options)), nodeid) == expected
    assert strip_group(cast("pytest.Config", Config(dist="load", loadgroup=False)), nodeid) == nodeid
    assert strip_group(cast("pytest.Config", Config()), nodeid) == nodeid


def test_ranks_and_the_reproduce_command_know_the_test_without_it(
    pytester: pytest.Pytester, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a worker: whether pytest lets xdist do that depends on its version.
    plain_nodeid: Any = pytest.Item.nodeid
    added = property(
        lambda item: plain_nodeid.fget(item) + "@one" * bool(getattr(item.config.option, "loadgroup", False))
    )
    monkeypatch.setattr(pytest.Item, "nodeid", added)
    pytester.makeconftest("def pytest_configure(config): config.option.loadgroup = True")
    killed = ranks.ending((RankEnd(0, "killed", "was killed by SIGKILL"), ()))
    payloads: list[Any] = []

    def run(_: RankKeeper, request: Request, reuse: Reuse) -> Ending:
        payloads.append(request.payload)
        return killed

    ranks.can_open = True
    monkeypatch.setattr(RankKeeper, "run", run)
    path = pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.distcompat(reuse="module")
        def test_one(): pass
        def test_two(): pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly")
    result.assert_outcomes(failed=2)
    first, second = (f"{path.name}::test_{name}" for name in ("one", "two"))
    order = [(payload["item"]["nodeid"], payload["next"]) for payload in payloads]
    assert order == [(first, second), (second, None)]
    # Where CI is set, pytest's summary says it all once more.
    commands = dict.fromkeys(line for line in result.outlines if line.startswith("reproduce: "))
    assert list(commands) == [f"reproduce: pytest {first}", f"reproduce: pytest {second}"]

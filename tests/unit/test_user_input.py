"""Values that a user gives: an address has a host, and perhaps a port that there is."""

from __future__ import annotations

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.user_input import read_address, write_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node-1", ("node-1", None)),
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("[::1]:1", ("::1", 1)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", None)),
    ],
)
def test_an_address(text: str, address: tuple[str, int | None]) -> None:
    assert read_address(text) == address
    host, port = address
    if port is not None:
        assert write_address(host, port) == text


@pytest.mark.parametrize(
    "text", ["", ":1", "host:", "host:x", "::1:80", "[::1", "host:0", "host:99999", "a b:1", "host:\uff11"]
)
def test_no_address(text: str) -> None:
    with pytest.raises(UsageProblem, match="is not right: expected"):
        read_address(text)

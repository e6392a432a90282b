"""The accelerate driver says on which releases its CPU set-up was tried."""

from __future__ import annotations

import warnings

import pytest

from pytest_distcompat.launch.accelerate_cpu import check_version


@pytest.mark.parametrize("version", ["1.6.0", "1.15.0", "1.16.0.dev0"])
def test_a_tested_version_is_accepted_silently(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(version)


def test_a_too_old_version_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"accelerate 1.5.2 cannot run FSDP2 on CPU ranks; 1.6 or newer is needed"):
        check_version("1.5.2")


def test_a_new_major_version_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"accelerate 2.0.1: .* was tested below 2 only; believe the check 'active'"):
        check_version("2.0.1")

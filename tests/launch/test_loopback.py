"""Ranks meet on the loopback interface: no other machine can connect, and a missing loopback name is reported."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from tests.launch.conftest import notes

from pytest_distcompat.launch import loopback

if TYPE_CHECKING:
    from tests.launch.conftest import Run

FINDING = "no loopback interface: ranks cannot meet at localhost; `ip link set lo up`"
MARKED = "import pytest\n@pytest.mark.distcompat(world_size=2)\ndef test(): pass\n"


def network_of_its_own() -> list[str]:
    """Return a command prefix for a network whose loopback interface is down; empty where that is not allowed."""
    with contextlib.suppress(OSError):
        if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0:
            return ["unshare", "--net"]
    return []


def has(address: str) -> bool:
    """Return whether this machine has that IPv6 address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind((address, 0))
        return True
    return False


@pytest.mark.spawn
def test_no_other_machine_can_connect_to_what_runs(run: Run) -> None:
    ending = run("listening")
    assert ending.kind == "ok", ending.text()
    for seen in notes(ending, "listening"):
        assert seen["addresses"]
        wild = [address for address in seen["addresses"] if ipaddress.ip_address(address).is_unspecified]
        assert not wild, f"{len(wild)} sockets accept connections on all interfaces"


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        pytest.param(
            ["127.0.0.1", "::1"], "::1", marks=pytest.mark.skipif(not has("::1"), reason="IPv6 is turned off")
        ),
        # In /etc/hosts, and turned off.
        (["2001:db8::1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_the_store_listens_where_localhost_is(
    addresses: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = {address: socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses}
    answer = [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for address, family in families.items()]
    monkeypatch.setattr(loopback, "_resolve", lambda *args, **more: answer)
    with loopback.listen() as listening:
        assert listening.getsockname()[0] == expected


def test_this_machine_has_a_loopback_name() -> None:
    assert loopback.problem() == ""


def test_an_unresolvable_loopback_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(loopback, "_resolve", refuse)
    assert loopback.problem().startswith(
        "localhost does not resolve (Name or service not known): ranks cannot meet there;"
    )


@pytest.mark.nightly
@pytest.mark.skipif(not network_of_its_own(), reason="this user may make no network of its own (unshare --net)")
@pytest.mark.parametrize("launcher", ["warm", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_without_a_loopback_name_a_test_fails_at_once_with_the_reason(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MARKED, encoding="utf-8")
    command = [*network_of_its_own(), sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += [
        f"--basetemp={tmp_path / 'base'}",
        f"--distcompat-launcher={launcher}",
        "--junitxml=junit.xml",
        "test_it.py",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Leases of its own.
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert FINDING in done.stdout
    (case,) = ET.parse(tmp_path / "junit.xml").iter("testcase")
    # It was 35 s.
    assert float(case.attrib["time"]) < 10


@pytest.mark.skipif(not network_of_its_own(), reason="this user may make no network of its own (unshare --net)")
def test_without_a_loopback_name_a_script_is_not_started(tmp_path: Path) -> None:
    """torchrun tries for minutes, and says nothing of the cause."""
    (tmp_path / "train.py").write_text("open('started', 'w')", encoding="utf-8")
    script = "from pytest_distcompat.ext.scripts import launch\nlaunch('train.py', world_size=2)"
    done = subprocess.run(
        [*network_of_its_own(), sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert FINDING in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.skipif(not network_of_its_own(), reason="this user may make no network of its own (unshare --net)")
def test_doctor_reports_a_missing_loopback_name() -> None:
    script = "from pytest_distcompat.cli.machine import findings, this_machine\n"
    script += "print(*(f'{one.level}: {one.text}' for one in findings(this_machine())), sep='\\n')"
    done = subprocess.run(
        [*network_of_its_own(), sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert f"problem: {FINDING}" in done.stdout.splitlines()

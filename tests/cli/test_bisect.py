"""``distcompat releases --bisect``: by hand-made wheels and a repository of its own; nothing is fetched from anywhere."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.ext.upstream.bisect import bisect, releases_of
from pytest_distcompat.failures import UsageProblem

Wheel = Callable[..., None]

TEST = """
import madeup

def test_size():
    if madeup.__version__ == "1.3":
        raise KeyboardInterrupt
    assert tuple(map(int, madeup.__version__.split("."))) < (1, {minor})
"""


def outcomes(releases: str, red: str) -> list[str]:
    """Return the releases that are run, of which ``?`` is neither red nor green."""

    def is_red(release: str) -> bool | None:
        if release == "?":
            return None
        return release in red

    return list(bisect(releases, lambda release: release, is_red))


def test_half_of_what_is_left_goes_with_each_run() -> None:
    assert outcomes("abcdefghi", red="fghi") == ["a", "i", "e", "g", "f"]
    assert outcomes("abcdefghi", red="abc") == ["a", "i", "e", "c", "d"]
    assert outcomes("ab", red="b") == ["a", "b"]
    thousand = "".join(map(chr, range(1000, 2024)))
    assert len(outcomes(thousand, red=thousand[-1])) == 12


def test_a_release_that_is_neither_red_nor_green_is_left_out() -> None:
    assert outcomes("ab?de", red="de") == ["a", "e", "?", "b", "d"]
    assert outcomes("a?e", red="e") == ["a", "e", "?"]


@pytest.mark.parametrize(("releases", "red"), [("abc", "abc"), ("abc", ""), ("?bc", "c"), ("ab?", "b")])
def test_ends_that_do_not_differ_are_all_that_runs(releases: str, red: str) -> None:
    assert outcomes(releases, red) == [releases[0], releases[-1]]


def test_releases_of_the_index_in_order(wheel: Wheel, tmp_path: Path) -> None:
    for version in ("1.9", "1.10", "1.11rc1", "1.12", "2.0"):
        wheel("madeup", version)
    assert releases_of("madeup==1.9..1.12", tmp_path) == ["madeup==1.9", "madeup==1.10", "madeup==1.12"]
    assert releases_of("madeup==1.11rc1..1.12", tmp_path) == ["madeup==1.11rc1", "madeup==1.12"]
    for text, message in {
        "madeup==1.9": "'madeup==1.9' is no range of releases; expected: accelerate==1.12.0..1.13.0 or ",
        "madeup==1.9..1.13": "madeup has no release 1.13; the newest: 1.9, 1.10, 1.11rc1, 1.12, 2.0",
        "madeup==2.0..1.9": "the first release is not older than the last",
        "nowhere==1..2": "pip lists no releases of nowhere: ",
    }.items():
        with pytest.raises(UsageProblem) as raised:
            releases_of(text, tmp_path)
        assert message in str(raised.value)


def git(directory: Path, *arguments: str) -> str:
    """Run git in the directory and return what it prints."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_commits_of_a_repository_in_order(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "--quiet", "--initial-branch=main")
    commits = []
    for number in range(3):
        git(origin, "commit", "--quiet", "--allow-empty", "-m", str(number))
        commits.append(git(origin, "rev-parse", "HEAD"))
    git(origin, "tag", "v1", commits[0])
    url = f"file://{origin}"
    expected = [f"madeup @ git+{url}@{commit}" for commit in commits]
    assert releases_of(f"madeup @ git+{url}@v1..main", tmp_path / "kept") == expected
    # The clone is kept, and follows the branch.
    git(origin, "commit", "--quiet", "--allow-empty", "-m", "new")
    assert len(releases_of(f"madeup @ git+{url}@v1..main", tmp_path / "kept")) == 4
    git(origin, "checkout", "--quiet", "-b", "side", commits[1])
    git(origin, "commit", "--quiet", "--allow-empty", "-m", "beside main")
    for ends, message in {
        "v1..v2": "git knows no revision v2",
        f"main..{commits[0]}": "main is no ancestor of ",
        "main..side": "main is no ancestor of side",
    }.items():
        with pytest.raises(UsageProblem, match=message):
            releases_of(f"madeup @ git+{url}@{ends}", tmp_path / "kept")


@pytest.mark.nightly
def test_the_release_that_turned_a_test_red(wheel: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("1.1", "1.2", "1.3", "1.4", "1.5"):
        wheel("madeup", version)
    (tmp_path / "test_mine.py").write_text(TEST.format(minor=4))
    page = tmp_path / "page.md"
    command = ["releases", "--bisect", "madeup==1.1..1.5", "--into", str(tmp_path / "kept"), "-o", str(page)]
    code = main([*command, "--", str(tmp_path / "test_mine.py"), "-p", "no:cacheprovider"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == (
        "the first red one is madeup==1.4; madeup==1.2 is green; madeup==1.3 is neither red nor green"
    ), out
    assert code == 0
    assert (
        page.read_text().splitlines()[0] == "| | madeup==1.1 | madeup==1.2 | madeup==1.3 | madeup==1.4 | madeup==1.5 |"
    )
    (tmp_path / "test_mine.py").write_text(TEST.format(minor=9))
    assert main([*command, "--", str(tmp_path / "test_mine.py"), "-p", "no:cacheprovider"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "madeup==1.1 is green; madeup==1.5 is green; expected one red and one green"


#: Builds a wheel without anything that would have to be fetched (PEP 517).
BACKEND = """
import zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name, about = "madeup-1.0-py3-none-any.whl", "madeup-1.0.dist-info"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.write("madeup.py")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\\nName: madeup\\nVersion: 1.0\\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{about}/RECORD", "")
    return name
"""


@pytest.mark.nightly
def test_the_commit_that_turned_a_test_red(wheel: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel("unrelated", "1")
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "--quiet", "--initial-branch=main")
    built = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (origin / "pyproject.toml").write_text(f'{built}[project]\nname = "madeup"\nversion = "1.0"\n')
    (origin / "backend.py").write_text(BACKEND)
    commits = []
    for number in range(6):
        (origin / "madeup.py").write_text(f'__version__ = "1.{number * 2}"\n')
        git(origin, "add", ".")
        git(origin, "commit", "--quiet", "-m", str(number))
        commits.append(git(origin, "rev-parse", "HEAD"))
    (tmp_path / "test_mine.py").write_text(TEST.format(minor=5))
    releases = f"madeup @ git+file://{origin}@{commits[0]}..main"
    code = main(
        ["releases", "--bisect", releases, "--into", str(tmp_path / "kept"), "--", str(tmp_path / "test_mine.py")]
    )
    out = capsys.readouterr().out
    assert f"the first red one is madeup @ git+file://{origin}@{commits[3]}; " in out.splitlines()[-1], out
    assert f"@{commits[2]} is green" in out.splitlines()[-1], out
    assert code == 0

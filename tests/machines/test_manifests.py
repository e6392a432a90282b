"""The manifests in ``examples/nodes``: they fit their schemas, and their commands run, here as two hosts on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples" / "nodes"
MANIFESTS = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text("utf-8")))
NODE = MANIFESTS[1]["spec"]["template"]["spec"]["containers"][0]
TASK = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text("utf-8"))
TOKEN = "0123456789abcdef"


@pytest.mark.nightly
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_kubernetes_accepts_it(manifest: Any) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make machines")
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.spawn
@pytest.mark.nightly
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="not root, or no unshare")
@pytest.mark.parametrize("kind", ["kubernetes", "skypilot"])
def test_its_commands_run_a_session(kind: str, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "hosts").write_text("127.0.0.1 localhost distcompat-0 distcompat-0.distcompat distcompat-1\n")
    shutil.copy(EXAMPLES.parents[1] / "tests" / "nodes" / "two_nodes.py", tmp_path / "test_two_nodes.py")
    script = NODE["command"][-1].replace("/token/", f"{tmp_path}/") if kind == "kubernetes" else TASK["run"]
    started = []
    for number in range(2):
        variables = {
            "JOB_COMPLETION_INDEX": str(number),
            "SKYPILOT_NODE_RANK": str(number),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "DISTCOMPAT_TOKEN": TOKEN,
            "PYTEST_ADDOPTS": "-p no:cacheprovider -k 'sum or one_node'",
            "HOME": str(tmp_path),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        host = f'hostname distcompat-{number}; mount --bind {tmp_path}/hosts /etc/hosts; exec bash -c "$1"'
        line = ["unshare", "--uts", "--mount", "bash", "-c", host, "-", script]
        with (tmp_path / f"{number}.out").open("wb") as out:
            theirs = {**environment, **variables}
            started.append(subprocess.Popen(line, cwd=tmp_path, env=theirs, stdout=out, stderr=out))
    codes = [process.wait(300) for process in started]
    written = [(tmp_path / f"{number}.out").read_text() for number in range(2)]
    assert codes == [0, 0], written
    assert "executor join (from option)" in written[0]
    assert "2 passed" in written[0]

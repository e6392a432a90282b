"""The launcher of a session over several nodes, made from the session's options.

``placement`` calls ``nodes_launcher`` once all tests are collected, if a test needs several *nodes*
(machines) or runs of xdist's workers are dealt out over nodes. Its input is what the tests need
(``Wanted``), the options (``--distcompat-executor slurm``), and the launcher of runs on this
machine. Its result is a ``NodesLauncher`` (``launcher``), or a usage error if options do not fit.
An *agent* is the process that starts ranks on a node, and an *executor* is how agents are started.
"""

from __future__ import annotations

import dataclasses

import pytest

from pytest_distcompat.ext.cluster.executors import EXECUTORS, Executor
from pytest_distcompat.ext.cluster.launcher import NodesLauncher
from pytest_distcompat.ext.cluster.settings import Settings
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.plugin.session import DistcompatSession


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which nodes the runs of a session need.

    Attributes:
        nodes: The most nodes that a test spans.
        worker_nodes: Over how many nodes the runs of xdist workers are dealt out; 0 if all are on
            this node.
        shares: Whether a test needs a directory that all its nodes share.
    """

    nodes: int
    worker_nodes: int
    shares: bool


#: Why options do not fit an executor, which is how agents are started on the nodes.
_COLD = (
    "cold torchrun runs on one node; "
    "expected no --distcompat-launcher torchrun beside several nodes"
)
_SHARES_GPUS = (
    "its nodes would share GPUs, which NCCL refuses; "
    "expected --distcompat-gpus 0, or another executor"
)


def nodes_launcher(
    session: DistcompatSession, wanted: Wanted, launcher: Launcher, warmth: Warmth
) -> NodesLauncher:
    """Return a launcher for runs of several nodes, which runs all others by ``launcher``.

    Raises:
        pytest.UsageError: An option does not fit the executor or its nodes.
    """
    name = session.setting("executor").value
    executor = EXECUTORS.get(name)()
    try:
        names = _names_of_nodes(session, wanted, executor)
    except UsageProblem as problem:
        raise pytest.UsageError(f"--distcompat-executor {name}: {problem}") from None
    shared_directory = ""
    if wanted.shares:
        shared_directory = str(session.store)
    # ``Settings`` explains these fields.
    settings = Settings(
        nodes=wanted.nodes,
        root=str(session.config.rootpath),
        device=session.device,
        listen=session.setting("listen").value or executor.listen,
        token=session.setting("token_file").value,
        wait=float(session.setting("warm_timeout").value),
        shared=shared_directory,
        gpus=session.gpus,
        ranks_each=session.ranks_each,
        runs_share=session.runs_share,
        say=session.say,
        timeline=str(session.store),
        worker=session.worker,
    )
    if names and wanted.worker_nodes:
        # Each worker of xdist (gw0, gw1, ...) has its runs on one node, the next worker on the next
        # node. Without xdist the worker's name is empty.
        worker = int(session.worker.removeprefix("gw") or 0)
        number = worker % len(names)
        node = names[number]
        others = names[number + 1 :] + names[:number]
        # If the node is lost, the others take over in turn. The node itself is the last of them:
        # its agent alone may be gone.
        settings = dataclasses.replace(settings, node=node, spare=(*others, node))
    # From it ranks on other nodes make the same pytest session.
    description = session.description_file.read_text(encoding="utf-8")
    return NodesLauncher(launcher, executor, settings, warmth, description)


def _names_of_nodes(
    session: DistcompatSession, wanted: Wanted, executor: Executor
) -> list[str] | None:
    """Return the names of the nodes on which runs can be, such as ``["n1", "n2"]``.

    None if they are not known yet: users start agents one by one, or to list them takes long.

    Raises:
        UsageProblem: Runs cannot be there.
    """
    reason = _why_no_executor(session, wanted, executor, session.setting("token_file").value)
    if reason:
        raise UsageProblem(reason)
    # ``lists_at_once``: the executor answers at once, so that too few nodes are reported early.
    names: list[str] | None = None
    if wanted.worker_nodes or executor.lists_at_once:
        names = executor.names(wanted.worker_nodes or wanted.nodes)
    reason = _why_no_nodes(wanted, names)
    if reason:
        raise UsageProblem(reason)
    return names


def _why_no_executor(
    session: DistcompatSession, wanted: Wanted, executor: Executor, token: object
) -> str:
    """Return why the options do not fit the executor, empty if they do.

    ``token`` is the session's secret, which nodes join with; empty if the user gave none.
    """
    unsupported = executor.unsupported_reason()
    if unsupported:
        return unsupported
    cold = session.setting("launcher").value != "warm"
    shares_gpus = executor.name == "local" and session.gpus > 0 and not wanted.worker_nodes
    # An executor with a hint leaves it to the user to start agents (``join``).
    has_no_token = bool(executor.hint) and not token
    has_workers = bool(executor.hint) and bool(session.worker)
    conditions: tuple[tuple[bool, str], ...] = (
        (cold, _COLD),
        (shares_gpus, _SHARES_GPUS),
        (
            has_no_token,
            "expected --distcompat-token-file FILE, with the token that nodes join with",
        ),
        (has_workers, "each worker of xdist would need nodes of its own; expected no -n"),
    )
    return first_reason(*conditions) or ""


def _why_no_nodes(wanted: Wanted, names: list[str] | None) -> str:
    """Return why runs cannot be on the nodes of these names, empty if they can.

    ``names`` is None if they are not known yet.
    """
    needed = wanted.worker_nodes or wanted.nodes
    if wanted.worker_nodes and wanted.nodes > 1:
        return "runs of one node and of several do not mix; expected no --distcompat-worker-nodes"
    if wanted.worker_nodes and names is None:
        return f"it cannot start agents on {wanted.worker_nodes} nodes one by one"
    if names is not None and len(names) < needed:
        names_text = ", ".join(names) or "none"
        return f"there are {len(names)} of {needed} nodes: {names_text}"
    return ""

"""torchrun's own agent, which starts the ranks of a run, on a port that no other process can take.

torchrun consists of an agent (``LocalElasticAgent``), which starts the ranks and waits for them,
and of a store, a TCP server by which the ranks of a process group find each other. ``run`` uses
both as torchrun does. ``server`` calls it in the launcher process, a child of pytest's process that
has imported torch, on the main thread, since the agent sets signal handlers. A request comes in,
which says how many ranks to start (``request.here`` are the numbers of those on this machine). A
dict goes out, as ``{"exit_codes": [0, -9], "first": 1, "ended_at": [12.3, 11.9]}``.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import pkgutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them without saying so
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from pytest_distcompat import clock
from pytest_distcompat.launch import loopback
from pytest_distcompat.launch.process import do_nothing, sweep_shared_memory
from pytest_distcompat.launch.request import Request

# To format the traceback of a failed run torch imports torch._dynamo, which takes more than a
# second. That traceback is of no use: the ranks themselves report what they did.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)

#: How long the agent sleeps before it checks its ranks again, in seconds. torchrun's default of 0.1
#: s would be most of a warm run. An interval of a few milliseconds costs no processor time only
#: because a check waits for a change (``WaitingAgent``).
MONITOR_INTERVAL_S = 0.001
#: How long a check waits for a change, in seconds: torch has limits of its own that it tests after
#: each check.
LONGEST_WAIT_S = 1.0


class OneAgent(StaticTCPRendezvous):
    """torchrun's static rendezvous of one agent with itself, on a port that the kernel chooses.

    A rendezvous is how the agents of a run meet; with one machine there is one agent. The kernel
    chooses the port of the store, so that no other process can take it in between. torch's static
    rendezvous needs a port chosen beforehand, and its c10d one backs off at random (0.1 to 0.4 s).
    The store answers every client that connects, so it listens on the loopback interface only;
    torch's own choice is all interfaces. Ranks meet on this very store, as they do under torchrun
    (``TORCHELASTIC_USE_AGENT_STORE``). https://pytorch.org/docs/stable/elastic/rendezvous.html
    """

    def __init__(self) -> None:
        self.store = store_on(loopback.listen())
        self.port = self.store.port
        run_id = str(uuid.uuid4())
        # Agent 0 of 1.
        super().__init__(loopback.HOST, self.port, 0, 1, run_id, timeout=60)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rendezvous at once: the only agent is this one."""
        store_info = RendezvousStoreInfo(loopback.HOST, self.port)
        store = PrefixStore(self.run_id, self.store)
        # Agent 0 of 1.
        return RendezvousInfo(store, 0, 1, store_info)

    def leave(self, store: Any) -> None:
        """Wait for nobody: ranks of no other agent use the store."""


def store_on(listening: socket.socket, host: str = loopback.HOST) -> Any:
    """Return a store that listens on that socket, and owns it from then on."""
    port = listening.getsockname()[1]
    file = listening.detach()
    options: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": file,
    }
    try:
        return TCPStore(host, port, **options)
    except NotImplementedError:
        # Some releases of torch take such a socket only without libuv, which is their default.
        return TCPStore(host, port, use_libuv=False, **options)


class WaitingAgent(LocalElasticAgent):
    """torchrun's agent, which waits for its ranks instead of polling them.

    It notes when it first saw that a rank was gone: a killed rank cannot report that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended_at: dict[int, float] = {}

    def _monitor_workers(self, worker_group: Any) -> Any:
        """Wait for a change, then check the ranks as torch does, and note which are gone.

        A change is the end of a rank's process, or a result in its queue: a rank that has finished
        stays until the agent has read its result. The method and what it reads are private;
        ``tests/launch/test_private_names.py`` fails when they move.
        """
        context: Any = self._pcontext
        returned = [queue._reader for queue in context._ret_vals.values()]  # noqa: SLF001
        # A signal that ends this process raises in here too.
        multiprocessing.connection.wait([*context._pc.sentinels, *returned], LONGEST_WAIT_S)  # noqa: SLF001
        for rank, code in enumerate(_exit_codes(self)):
            if code is not None:
                self.ended_at.setdefault(rank, clock.now())
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait for other agents, whose ranks may still use the store of this one.

        torch waits in C++, where no signal ends it. So the rendezvous waits instead;
        ``OneAgent.leave`` returns at once. The method is private, as above.
        """
        rendezvous: Any = self._worker_group.spec.rdzv_handler
        rendezvous.leave(self._store)


def run(
    request: Request,
    entrypoint: Callable[[str], None],
    start_method: str,
    listens: Callable[[int], None],
) -> dict[str, Any]:
    """Run one request under torchrun's agent.

    Args:
        request: The request of the run.
        entrypoint: The function to call on each rank, with the path of the request: ``rank.forked``
            or ``rank.main``.
        start_method: multiprocessing's start method, ``forkserver`` or ``spawn``.
        listens: Called with the port of the store that this agent opens for those of other
            machines. Not called in a run on one machine.

    Returns:
        A dict. ``exit_codes``: of each rank; negative for a signal, None if it is still alive.
        ``first``: the rank that the agent saw fail first, or None. ``ended_at``: of each rank, when
        the agent saw its process gone, by ``clock.now``; None if it did not.
    """
    Path(request.directory, "logs").mkdir(exist_ok=True)
    # Ranks write their exceptions there for torch, which does not always remove the files.
    tempfile.tempdir = request.directory
    rendezvous: Any = None
    agent: WaitingAgent | None = None
    first: int | None = None
    try:
        try:
            # torch sets its own handler, which raises the same, once it starts ranks.
            signal.signal(signal.SIGTERM, _stop)
            rendezvous = _rendezvous(request, listens)
            agent = _agent(request, entrypoint, start_method, rendezvous)
            result = agent.run()
            if result is not None:
                first = next(iter(result.failures), None)
        finally:
            # pytest's process may have sent it just before it reads the answer. Later the handler
            # would end what comes next.
            signal.signal(signal.SIGTERM, do_nothing)
    except SignalException:
        # pytest's process sent SIGTERM because no rank is left. An agent whose ranks all ended by
        # os._exit(0) would wait for their results for ever.
        pass
    except Exception:
        # torch reads the file with a rank's exception, which may be cut (a full disk). Exit codes
        # are there all the same.
        if agent is None or agent._pcontext is None:  # noqa: SLF001 - see _exit_codes
            raise
    finally:
        tempfile.tempdir = None
        if rendezvous is not None:
            # The rendezvous of several machines has a thread that tells the other agents that this
            # one is alive. It ends now.
            rendezvous.shutdown()
    if rendezvous is None or agent is None:
        # A signal ended the run before it had an agent.
        return {"exit_codes": [], "first": None, "ended_at": []}
    # DeepSpeed's CPU collectives leave files in /dev/shm, named by the port and the rank.
    sweep_shared_memory(request.here, rendezvous.port)
    codes = _exit_codes(agent)
    ended_at = [agent.ended_at.get(rank) for rank in range(len(codes))]
    return {"exit_codes": codes, "first": first, "ended_at": ended_at}


def _rendezvous(request: Request, listens: Callable[[int], None]) -> Any:
    """Return the rendezvous by which the agent meets those of other machines.

    A run on one machine has a ``OneAgent``. In a run over several machines ``request.place`` says
    which part of it this machine has: ``{"number": 0, "rendezvous": "module:function", ...}``, with
    the function that makes the rendezvous.
    """
    if not request.place:
        return OneAgent()
    meet = pkgutil.resolve_name(request.place["rendezvous"])
    return meet(request, listens)


def _agent(
    request: Request,
    entrypoint: Callable[[str], None],
    start_method: str,
    rendezvous: Any,
) -> WaitingAgent:
    """Return the agent that will start the request's ranks of this machine.

    ``run`` explains the arguments. Ranks write what they print to files below ``logs``.
    """
    spec = WorkerSpec(
        role="default",
        local_world_size=len(request.here),
        entrypoint=entrypoint,
        args=(str(request.path),),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    log_directory = Path(request.directory) / "logs"
    logs = DefaultLogsSpecs(log_dir=str(log_directory), redirects=Std.ALL)
    return WaitingAgent(spec, logs, start_method=start_method)


def _stop(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - the signature of handlers
    """End the run, as torch's own handler does."""
    raise SignalException("the parent ends the run", signal.Signals(number))


def _exit_codes(agent: LocalElasticAgent) -> list[int | None]:
    """Return each rank's exit code, negative for a signal.

    ``agent.run()`` reports only the rank that it noticed first, which need not be the one that
    failed first. The processes themselves are private to the agent;
    ``tests/launch/test_private_names.py`` fails when they move.
    """
    context: Any = agent._pcontext  # noqa: SLF001 - see the docstring
    if context is None:
        # A signal ended the agent before it had started ranks.
        return []
    processes: list[multiprocessing.Process] = context._pc.processes  # noqa: SLF001
    return [process.exitcode for process in processes]

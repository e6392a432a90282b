"""torchrun's own agent, on a store whose port cannot race. Runs in the launcher process, on its main thread."""

from __future__ import annotations

import logging
import multiprocessing.connection
import socket
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them without saying so
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from pytest_distcompat import clock
from pytest_distcompat.launch import loopback
from pytest_distcompat.launch.process import sweep_shared_memory
from pytest_distcompat.launch.request import Request

# To format the traceback of a failed run torch imports torch._dynamo, which takes more than a second. That traceback is
# of no use: the ranks themselves report what they did.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)

#: How long the agent sleeps before it checks its ranks again, in seconds. torchrun's default of 0.1 s would be most of a warm
#: run. An interval of a few milliseconds costs no processor time only because a check waits for a change (``WaitingAgent``).
MONITOR_INTERVAL_S = 0.001
#: How long a check waits for a change, in seconds: torch has limits of its own that it tests after each check.
LONGEST_WAIT_S = 1.0


class OneNode(RendezvousHandler):
    """A rendezvous of one agent with itself, on a store bound to port 0: the kernel chooses the port, without a race.

    The store answers every client that connects, so it listens on the loopback interface only. torch's own choice is all
    interfaces. torchrun's static back end needs a port chosen beforehand, and its c10d one backs off at random (0.1 to 0.4 s).
    Ranks meet on this very store, as they do under torchrun (``TORCHELASTIC_USE_AGENT_STORE``).
    https://pytorch.org/docs/stable/elastic/rendezvous.html
    """

    def __init__(self) -> None:
        self._run_id = str(uuid.uuid4())
        self.store = _store_on(loopback.listen())

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to the agent's store."""
        return True

    def get_backend(self) -> str:
        """Return the name that logs show."""
        return "distcompat"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rendezvous at once: the only node is here."""
        store_info = RendezvousStoreInfo(loopback.HOST, self.store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self.store), 0, 1, store_info)

    def is_closed(self) -> bool:
        """Return False: the rendezvous lives as long as the agent."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node ever comes."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id, a new one for each run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: the store goes with the object."""
        return True


def _store_on(listening: socket.socket) -> Any:
    """Return a store that listens on that socket, and owns it from then on."""
    port = listening.getsockname()[1]
    file = listening.detach()
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": file}
    try:
        return TCPStore(loopback.HOST, port, **options)
    except NotImplementedError:
        # Some releases of torch take such a socket only without libuv, which is their default.
        return TCPStore(loopback.HOST, port, use_libuv=False, **options)


class WaitingAgent(LocalElasticAgent):
    """torchrun's agent, which waits for its ranks instead of polling them.

    It notes when it first saw that a rank was gone: a killed rank cannot report that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended_at: dict[int, float] = {}

    def _monitor_workers(self, worker_group: Any) -> Any:
        """Wait for a change, then check. A rank that returned waits until the agent has noticed.

        The method and what it reads are private; ``tests/launch/test_private_names.py`` fails when they move.
        """
        context: Any = self._pcontext
        returned = [queue._reader for queue in context._ret_vals.values()]  # noqa: SLF001
        # A signal that ends this process raises in here too.
        multiprocessing.connection.wait([*context._pc.sentinels, *returned], LONGEST_WAIT_S)  # noqa: SLF001
        for rank, code in enumerate(_exit_codes(self)):
            if code is not None:
                self.ended_at.setdefault(rank, clock.now())
        return super()._monitor_workers(worker_group)


def run(request: Request, entrypoint: Callable[[str], None], start_method: str) -> dict[str, Any]:
    """Run one request under torchrun's agent.

    Returns:
        The ranks' ``exit_codes`` (None: still alive), the rank that the agent saw fail ``first``, the names of the shared memory
        that was ``swept``, and by rank when the agent saw its process gone (``ended_at``).
    """
    rendezvous = OneNode()
    port = rendezvous.store.port
    spec = WorkerSpec(
        role="default",
        local_world_size=request.world_size,
        entrypoint=entrypoint,
        args=(str(request.path),),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    logs = DefaultLogsSpecs(log_dir=str(Path(request.directory) / "logs"), redirects=Std.ALL)
    Path(request.directory, "logs").mkdir(exist_ok=True)
    # Ranks write their exceptions there for torch, which does not always remove the files.
    tempfile.tempdir = request.directory
    agent = WaitingAgent(spec, logs, start_method=start_method)
    first: int | None = None
    try:
        result = agent.run()
        first = next(iter(result.failures), None) if result is not None else None
    except SignalException:
        # The parent knows that no rank is left. An agent whose ranks all ended by os._exit(0) would wait for ever.
        pass
    except Exception:
        # torch reads the file with a rank's exception, which may be cut (a full disk). Exit codes are there all the same.
        if agent._pcontext is None:  # noqa: SLF001 - see _exit_codes
            raise
    finally:
        tempfile.tempdir = None
    codes = _exit_codes(agent)
    swept = sweep_shared_memory(range(request.world_size), port)
    return {
        "exit_codes": codes,
        "first": first,
        "swept": swept,
        "ended_at": [agent.ended_at.get(rank) for rank in range(len(codes))],
    }


def _exit_codes(agent: LocalElasticAgent) -> list[int | None]:
    """Return each rank's exit code, negative for a signal.

    ``agent.run()`` reports only the rank that it noticed first, which need not be the one that failed first. The processes
    themselves are private to the agent; ``tests/launch/test_private_names.py`` fails when they move.
    """
    context: Any = agent._pcontext  # noqa: SLF001 - see the docstring
    processes: list[multiprocessing.Process] = context._pc.processes  # noqa: SLF001
    return [process.exitcode for process in processes]

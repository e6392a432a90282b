"""Environment variables of ranks, as torchrun would set them if it were started now.

A rank of torchrun has the environment of the shell, and a few variables of torchrun's. A warm rank
is forked from a process that was started earlier, and tests may have changed ``os.environ`` since.
So ``launcher_process`` starts that process with ``of_launcher``, and ``warm`` sends each request
through ``adapted``: it returns the request with the differences, as ``set={"MODE": "fast"}`` and
``unset=["DEBUG"]``, which the rank applies first (``rank.prepare``).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.request import Request

#: The variables that torchrun's agent, which starts the ranks, sets for each of them. Their values
#: in the environment of pytest's process do not count.
OF_THE_AGENT = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID|USE_AGENT_STORE|ERROR_FILE))"
)


def of_ranks(now: Mapping[str, str], device: str, local_world_size: int) -> dict[str, str]:
    """Return the variables that torchrun hands on to its ranks (torch/distributed/run.py).

    Args:
        now: The environment in which torchrun would be started.
        device: ``cuda`` or ``cpu``.
        local_world_size: The number of ranks on this machine.
    """
    # For ranks on the CPU it hides GPUs from torch and DeepSpeed.
    environment = on_device(now, device)
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if local_world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def of_launcher(now: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the variables of the launcher process, which starts the fork servers.

    Fork servers are the processes from which ranks are forked. The variables keep libraries from
    starting CUDA or threads there, because a process with either cannot be forked safely.

    Args:
        now: The environment of pytest's process.
        device: ``cuda`` or ``cpu``.
    """
    environment = of_ranks(now, device, 1)
    # No threads of OpenMP and OpenBLAS in the fork servers, unless the user has set the variable.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # No thread of the jemalloc in pyarrow, which datasets imports. Its variables have this prefix:
    # https://jemalloc.net/jemalloc.3.html (opt.background_thread).
    users_value = environment.get("JE_ARROW_MALLOC_CONF", "")
    settings = ["background_thread:false"]
    if users_value:
        settings.append(users_value)
    environment["JE_ARROW_MALLOC_CONF"] = ",".join(settings)
    # With it torch.cuda.is_available() asks NVML, NVIDIA's library of device management, and
    # creates no CUDA context.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return environment


def adapted(request: Request, base: Mapping[str, str], device: str) -> Request:
    """Return a request whose ``set`` and ``unset`` give warm ranks the environment that they need.

    Args:
        request: The request of a run.
        base: The environment that the warm ranks have.
        device: ``cuda`` or ``cpu``.
    """
    # With this process's command line, ``sys.path`` and working directory.
    request = request.from_here()
    ranks_on_this_machine = len(request.here)
    needed = {**of_ranks(os.environ, device, ranks_on_this_machine), **request.set}
    to_set = {}
    to_unset = []
    for name in sorted({*needed, *base}):
        if OF_THE_AGENT.fullmatch(name) or needed.get(name) == base.get(name):
            continue
        if name in needed:
            to_set[name] = needed[name]
        else:
            to_unset.append(name)
    return dataclasses.replace(request, set=to_set, unset=to_unset)

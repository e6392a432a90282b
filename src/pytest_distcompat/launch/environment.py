"""The environments of the launcher process and of ranks, as torchrun would give them if it were started now."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.request import Request

#: The variables that the agent alone gives to ranks, whatever the environment says.
OF_THE_AGENT = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID|USE_AGENT_STORE|ERROR_FILE))"
)


def of_ranks(now: Mapping[str, str], device: str, local_world_size: int) -> dict[str, str]:
    """Return what ranks inherit from the torchrun command, and it from ``now`` (torch/distributed/run.py)."""
    environment = on_device(now, device)
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if local_world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def of_launcher(now: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the launcher process's environment. Nothing in it starts CUDA or threads, unless the user wants threads."""
    environment = of_ranks(now, device, 1)
    # OpenMP and OpenBLAS start no threads in the fork servers, whatever ranks get.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # pyarrow, which datasets imports, then starts no thread of its jemalloc: https://jemalloc.net/jemalloc.3.html
    # (opt.background_thread); pyarrow's own has this prefix.
    users_value = environment.get("JE_ARROW_MALLOC_CONF", "")
    settings = ["background_thread:false"]
    if users_value:
        settings.append(users_value)
    environment["JE_ARROW_MALLOC_CONF"] = ",".join(settings)
    # torch.cuda.is_available() then asks NVML, and leaves the fork server without a CUDA context.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return environment


def adapted(request: Request, base: Mapping[str, str], device: str) -> Request:
    """Return the request from here, with the changes that turn the environment ``base`` into the one that its ranks need."""
    request = request.from_here()
    now = {**of_ranks(os.environ, device, len(request.here)), **request.set}
    set_now = {}
    unset_now = []
    for name in sorted({*now, *base}):
        if OF_THE_AGENT.fullmatch(name) or now.get(name) == base.get(name):
            continue
        if name in now:
            set_now[name] = now[name]
        else:
            unset_now.append(name)
    return dataclasses.replace(request, set=set_now, unset=unset_now)

"""Every function that changes something for all of a process is compared after each test, or the docs say that it is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from tests.launch import setters
from tests.launch.state_changes import CHANGES

pytestmark = pytest.mark.spawn

PAGE = Path(__file__).parents[2] / "docs" / "marker.md"

#: Patterns of setters, and under which name what they set is compared: ``test_reused_ranks`` proves each name by a change.
COMPARED = {
    "asyncio.set_event_loop*": "asyncio's event loops",
    "atexit.*": "what is to be done at exit",
    "codecs.register_error": "how text is encoded that does not fit",
    "decimal.setcontext": "how decimal numbers are computed",
    "faulthandler.[de]*able": "the interpreter's settings",
    "gc.*": "garbage collection",
    "locale.setlocale": "the locale",
    "logging.disable": "logging",
    "multiprocessing.set_executable": "multiprocessing's interpreter",
    "multiprocessing.set_start_method": "multiprocessing's start method",
    "numpy.polynomial.set_default_printstyle": "how numpy prints polynomials",
    "numpy.set*": "numpy's settings",
    "os.set*[gu]id": "user, group and session",
    "os.setgroups": "user, group and session",
    "os.setsid": "user, group and session",
    "os.setpgrp": "user, group and session",
    "os.setpriority": "the CPUs it may use",
    "resource.setrlimit": "resource limits",
    "signal.set_wakeup_fd": "the file that signals wake up",
    "signal.setitimer": "timers",
    "socket.setdefaulttimeout": "the default time limit of sockets",
    "sys.set*": "the interpreter's settings",
    "threading.set*": "the interpreter's settings",
    "torch.__future__.set_*": "torch's global flags",
    "torch.autograd.graph.*_saved_tensors*": "hooks for saved tensors",
    "torch.backends.cuda.*": "torch's global flags",
    "torch.backends.mha.*": "torch's global flags",
    "torch.backends.nnpack.*": "torch's global flags",
    "torch.compiler.set_stance": "torch.compile's stance",
    "torch.cuda.set_sync_debug_mode": "torch's global flags",
    "torch.distributed.set_debug_level*": "the debug level of torch.distributed",
    "torch.hub.set_dir": "torch's global flags",
    "torch.jit.enable_onednn_fusion": "torch's global flags",
    "torch.multiprocessing.set_sharing_strategy": "torch's global flags",
    "torch.nn.modules.module.register_*": "torch's global hooks",
    "torch.*.register_optimizer_step_*": "torch's global hooks",
    "torch.serialization.*_safe_globals": "how torch loads and saves",
    "torch.serialization.set_*": "how torch loads and saves",
    "torch.set_printoptions": "how torch prints",
    "torch.set_*": "torch's global flags",
    "torch.use_deterministic_algorithms": "torch's global flags",
    "torch.utils.checkpoint.set_checkpoint_*": "how torch recomputes",
    "torch.utils.deterministic.*": "torch's global flags",
}
#: The reasons why the others are not, in the page's words.
REGISTERED = "new registrations"
UNREADABLE = "what cannot be read"
ACCELERATORS = "settings of accelerators"
RANDOM = "Each test has fresh random states"
NOT_COMPARED = {
    "codecs.*register": REGISTERED,
    "copyreg.*": REGISTERED,
    "csv.*": REGISTERED,
    "email.charset.*": REGISTERED,
    "faulthandler.*register": UNREADABLE,
    "mimetypes.*": REGISTERED,
    "multiprocessing.allow_connection_pickling": REGISTERED,
    "multiprocessing.set_forkserver_preload": UNREADABLE,
    "numpy.random.*": RANDOM,
    "os.register_at_fork": UNREADABLE,
    "random.*": RANDOM,
    "shutil.*": REGISTERED,
    "sqlite3.*": REGISTERED,
    "sys.addaudithook": UNREADABLE,
    "torch.*.set_*device*": ACCELERATORS,
    "torch.*.set_stream": ACCELERATORS,
    "torch.*.set_per_process_memory_fraction": ACCELERATORS,
    "torch.*.use_mem_pool": ACCELERATORS,
    "torch.cuda.tunable.*": ACCELERATORS,
    "torch.*set_rng_state*": RANDOM,
    "torch.autograd.graph.set_*": UNREADABLE,
    "torch.backends.python_native.*": REGISTERED,
    "torch.compiler.allow_in_graph": REGISTERED,
    "torch.compiler.set_*": UNREADABLE,
    "torch.distributed.*register_*": REGISTERED,
    "torch.distributed.rpc.enable_gil_profiling": UNREADABLE,
    "torch.distributions.register_kl": REGISTERED,
    "torch.export.*": REGISTERED,
    "torch.fx.traceback.set_*": UNREADABLE,
    "torch.jit.set_fusion_strategy": UNREADABLE,
    "torch.library.register_*": REGISTERED,
    "torch.monitor.*": REGISTERED,
    "torch.multiprocessing.reductions.register_after_fork": UNREADABLE,
    "torch.nn.attention.register_*": REGISTERED,
    "torch.return_types.register_*": REGISTERED,
    "torch.serialization.register_package": REGISTERED,
    "torch.utils.data.datapipes.*": UNREADABLE,
    "urllib.request.install_opener": UNREADABLE,
    "webbrowser.*": REGISTERED,
    "xml.*.register_namespace": REGISTERED,
}
#: What changes only what it is given, or a file, the machine, or a cache.
OF_ITS_ARGUMENTS = (
    *(
        "asyncio.set_child_watcher",
        "ctypes.*",
        "numpy.add",
        "numpy.lib.*",
        "numpy.*.set_module",
        "os.remove*",
        "os.set_*",
    ),
    *(
        "os.setpgid",
        "os.setxattr",
        "socket.sethostname",
        "torch.add*",
        "torch.sparse.addmm",
        "torch.clear_autocast_cache",
    ),
    *("torch.autograd.graph.register_multi_grad_hook", "torch.compiler.disable", "torch.compiler.config.*"),
    *(
        "torch.distributed.*.set_pytorch_distributed_envs_from_justknobs",
        "torch.distributed.fsdp.*",
        "torch.*.set_module",
    ),
    *("torch.fx.experimental.*", "torch.nn.utils.*", "torch.optim.lr_scheduler.override", "torch.quantization.*"),
    *(
        "torch.overrides.enable_reentrant_dispatch",
        "torch.utils.checkpoint.clear_overloads",
        "tracemalloc.clear_traces",
    ),
    *("torch.ao.*", "torch.utils.set_module"),
)


@pytest.fixture(scope="module")
def setter_names() -> list[str]:
    """The setters of what is installed; asked in a process of its own, for it imports much of torch."""
    command = [sys.executable, "-W", "ignore", setters.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    names: list[str] = json.loads(done.stdout)
    return names


def test_every_setter_is_compared_or_on_the_page(setter_names: list[str]) -> None:
    assert len(setter_names) > 150
    patterns = [*COMPARED, *NOT_COMPARED, *OF_ITS_ARGUMENTS]
    unknown = [name for name in setter_names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert not unknown, (
        "compare what they set in ext/reuse/process_state.py or library_state.py, or write on the page that it is not compared"
    )


@pytest.mark.parametrize("name", sorted({*COMPARED.values()}))
def test_every_comparison_has_a_change_that_it_finds(name: str) -> None:
    assert name in {key.partition(":")[0] for key in CHANGES}


@pytest.mark.parametrize("reason", sorted({*NOT_COMPARED.values()}))
def test_the_page_has_every_reason(reason: str) -> None:
    assert reason in re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))

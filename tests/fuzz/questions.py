"""Random questions that a test could ask of its process. No rule says the answer: it is that of plain torchrun's ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

#: What all modules of a batch import first. Nothing else is imported, so a question's answer does not depend on other ones.
HEAD = '''"""Written by the fuzzer."""
import asyncio
import concurrent
import ctypes
import decimal
import email
import faulthandler
import gc
import importlib
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import unittest
import urllib
import warnings
import xml

import pytest
import torch
{libraries}

pytestmark = pytest.mark.distcompat(world_size=2)
HERE = os.path.dirname(os.path.abspath(__file__))


def raises(error, call):
    try:
        call()
    except error:
        return True
    return False


def signal_state(name):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(name))


def in_child(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def forked(call):
    pid = os.fork()
    if pid == 0:
        os._exit(int(bool(call())))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
'''

#: Libraries that the modules of a batch may import.
LIBRARIES = (
    *("numpy", "accelerate", "transformers", "peft", "safetensors", "psutil", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torch.utils.data", "torch.multiprocessing", "torch.optim.swa_utils"),
)
#: Packages, and the names of what may be reached as their attributes.
PACKAGES = {
    "concurrent": ("futures",),
    "email": ("message", "mime", "parser", "policy", "utils", "header"),
    "importlib": ("resources", "metadata", "util", "abc", "machinery", "simple"),
    "json": ("tool", "decoder", "scanner"),
    "logging": ("handlers", "config"),
    "asyncio": ("subprocess", "taskgroups"),
    "ctypes": ("util", "wintypes"),
    "unittest": ("mock", "case"),
    "urllib": ("request", "parse", "error", "response", "robotparser"),
    "xml": ("dom", "etree", "sax", "parsers"),
    "torch": (
        *(
            "_dynamo",
            "_inductor",
            "compiler",
            "export",
            "fx",
            "func",
            "distributions",
            "ao",
            "testing",
            "hub",
            "profiler",
        ),
        *(
            "onnx",
            "package",
            "jit",
            "sparse",
            "futures",
            "special",
            "masked",
            "nested",
            "_export",
            "_functorch",
            "_refs",
        ),
    ),
    "torch.distributed": (
        *("fsdp", "tensor", "checkpoint", "algorithms", "optim", "pipelining", "rpc", "elastic", "run", "nn", "utils"),
        *(
            "_composable",
            "_tensor",
            "_shard",
            "launcher",
            "device_mesh",
            "collective_utils",
            "constants",
            "c10d_logger",
        ),
        *("distributed_c10d", "rendezvous", "autograd", "_functional_collectives", "_tools", "debug", "config"),
    ),
    "torch.nn": ("attention", "intrinsic", "quantized", "qat", "utils", "parallel", "init", "grad"),
    "torch.nn.utils": ("prune", "parametrize", "stateless", "rnn", "clip_grad"),
    "torch.optim": ("swa_utils", "lr_scheduler", "_multi_tensor"),
    "torch.utils": (
        *("data", "checkpoint", "tensorboard", "benchmark", "cpp_extension", "flop_counter", "mobile_optimizer"),
        *("_pytree", "_python_dispatch", "collect_env", "deterministic", "hooks", "model_zoo", "serialization", "weak"),
    ),
    "torch.utils.data": ("distributed", "datapipes", "dataloader", "graph"),
    "torch.fx": ("experimental", "passes", "traceback", "operator_schemas"),
}
VARIABLES = (
    *(
        "CUDA_VISIBLE_DEVICES",
        "DS_ACCELERATOR",
        "CUDA_DEVICE_ORDER",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MODULE_LOADING",
    ),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "JE_ARROW_MALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR"),
    *(
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_DISTRIBUTED_DEBUG",
    ),
    *(
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RUN_ID",
    ),
    *(
        "PYTEST_VERSION",
        "PYTEST_CURRENT_TEST",
        "PYTEST_XDIST_WORKER",
        "PYTEST_ADDOPTS",
        "DISTCOMPAT_INSIDE",
        "PYTHONPATH",
    ),
    *(
        "KMP_AFFINITY",
        "KMP_INIT_AT_FORK",
        "TOKENIZERS_PARALLELISM",
        "HF_HUB_OFFLINE",
        "ACCELERATE_USE_CPU",
        "LOCAL_RANK",
    ),
    *("GROUP_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED"),
    *(
        "PYTHONHASHSEED",
        "PYTHONFAULTHANDLER",
        "TMPDIR",
        "LC_CTYPE",
        "COLUMNS",
        "HOME",
        "TRITON_CACHE_DIR",
        "NVIDIA_TF32_OVERRIDE",
    ),
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCH_SHOW_CPP_STACKTRACES",
        "PYTHONWARNINGS",
    ),
)
SIGNALS = (
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGQUIT",
    "SIGUSR1",
    "SIGUSR2",
    "SIGCHLD",
    "SIGPIPE",
    "SIGALRM",
    "SIGABRT",
    "SIGSEGV",
)
LOGGERS = (
    "",
    "torch",
    "torch.distributed",
    "accelerate",
    "transformers",
    "asyncio",
    "of_the_user",
    "DeepSpeed",
    "urllib3",
)
WARNINGS = ("UserWarning", "DeprecationWarning", "FutureWarning", "ResourceWarning", "ImportWarning", "SyntaxWarning")
LIMITS = ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_STACK", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_MEMLOCK")

#: What is asked, by what the docs would call it if it may differ.
PLAIN = {
    "leads its session": (
        "os.getsid(0) == os.getpid()",
        "raises(OSError, os.setsid)",
        "os.getsid(0) == os.getsid(os.getppid())",
    ),
    "leads its group": (
        *("os.getpgid(0) == os.getpid()", "os.getpgid(0) == os.getpgid(os.getppid())", "raises(OSError, os.setpgrp)"),
        "os.tcgetpgrp(0) if os.isatty(0) else True",
    ),
    "multiprocessing": (
        *("multiprocessing.parent_process() is None", "multiprocessing.current_process().name == 'MainProcess'"),
        *("multiprocessing.get_start_method() == 'fork'", "multiprocessing.current_process().daemon"),
        *("bool(multiprocessing.active_children())", "multiprocessing.get_start_method(allow_none=True) is None"),
        *(
            "forked(lambda: multiprocessing.Process().name == 'Process-1')",
            "multiprocessing.get_context().get_start_method() == 'fork'",
        ),
    ),
    "gc freezes objects": ("gc.get_freeze_count() == 0",),
    "gc": (
        "gc.isenabled()",
        "gc.get_threshold()[0] == 700",
        "gc.callbacks == []",
        "gc.get_debug() == 0",
        "gc.garbage == []",
    ),
    "umask": ("os.umask(os.umask(0o22)) == 0o22", "forked(lambda: os.umask(0) == 0)"),
    "working directory": ("os.getcwd() == HERE",),
    "sys.path": (
        *(
            "sys.path[0] == HERE",
            "HERE in sys.path",
            "sys.path.count(HERE) == 1",
            "'' in sys.path",
            "len(sys.path) > 6",
        ),
        *("len(set(sys.path)) == len(sys.path)", "sys.path.index(HERE) == 0", "os.path.isdir(sys.path[0])"),
        "any('pytest_distcompat' in one for one in sys.path)",
    ),
    "sys.argv": (
        "len(sys.argv) > 3",
        "sys.argv[0].endswith('__main__.py')",
        "'pytest' in sys.argv[0]",
        "'-q' in sys.argv",
    ),
    "sys.orig_argv": ("'pytest' in sys.orig_argv",),
    "__main__ file": ("str(getattr(sys.modules['__main__'], '__file__', '')).endswith('pytest/__main__.py')",),
    "__main__ spec": ("getattr(sys.modules['__main__'].__spec__, 'name', '') == 'pytest.__main__'",),
    "threads": (
        *("threading.active_count() == 1", "threading.current_thread() is threading.main_thread()"),
        *("threading.get_native_id() == os.getpid()", "threading.current_thread().name == 'MainThread'"),
        "threading.stack_size() == 0",
    ),
    "native threads": ("len(os.listdir('/proc/self/task')) == 1",),
    "interpreter": (
        *(
            "sys.getrecursionlimit() == 1000",
            "sys.gettrace() is None",
            "sys.getprofile() is None",
            "sys.getswitchinterval() == 0.005",
        ),
        *(
            "sys.flags.dev_mode",
            "sys.excepthook is sys.__excepthook__",
            "threading.excepthook is threading.__excepthook__",
        ),
        *("sys.unraisablehook is sys.__unraisablehook__", "sys.dont_write_bytecode", "sys.pycache_prefix is None"),
        *(
            "sys.displayhook is sys.__displayhook__",
            "hasattr(sys, 'last_value')",
            "sys.getdlopenflags() == os.RTLD_NOW",
        ),
        *(
            "tracemalloc.is_tracing()",
            "hasattr(sys, 'ps1')",
            "sys.stdout is sys.__stdout__",
            "sys.breakpointhook is sys.__breakpointhook__",
        ),
        "faulthandler.is_enabled()",
    ),
    "streams": (
        *(
            "sys.stdin.isatty()",
            "sys.stdout.isatty()",
            "raises(OSError, sys.stdin.read)",
            "os.isatty(1)",
            "os.read(0, 1) == b''",
        ),
        *("sys.stdout.encoding.lower() == 'utf-8'", "sys.stdout.errors == 'strict'", "sys.stdout.line_buffering"),
        *(
            "sys.stderr.line_buffering",
            "sys.stdout.fileno() == 1",
            "raises(Exception, sys.stdin.fileno)",
            "sys.stdout.write_through",
        ),
        *(
            "sys.__stdout__.line_buffering",
            "sys.__stdout__.write_through",
            "sys.__stderr__.line_buffering",
            "sys.__stdout__.isatty()",
        ),
    ),
    "locale": (
        *(
            "locale.getlocale()[1] == 'UTF-8'",
            "locale.getpreferredencoding(False).lower() == 'utf-8'",
            "time.tzname == ('UTC', 'UTC')",
        ),
        "sys.getfilesystemencoding() == 'utf-8'",
    ),
    "torch": (
        *("torch.get_num_threads() == 1", "torch.get_default_dtype() is torch.float32", "torch.is_grad_enabled()"),
        *("torch.get_num_interop_threads() == 1", "torch.cuda.is_available()", "torch.cuda.is_initialized()"),
        *(
            "torch.distributed.is_initialized()",
            "torch.distributed.is_torchelastic_launched()",
            "torch.is_anomaly_enabled()",
        ),
        *("torch.initial_seed() == 42", "torch.backends.mkldnn.enabled", "torch.accelerator.is_available()"),
        *(
            "torch.cuda.device_count() == 0",
            "torch.get_float32_matmul_precision() == 'highest'",
            "torch.utils.data.get_worker_info() is None",
        ),
        *("torch.cuda._is_in_bad_fork()", "torch.multiprocessing.get_sharing_strategy() == 'file_descriptor'"),
        "torch.is_inference_mode_enabled()",
    ),
    "random states": ("random.getstate()[1][-1] == 624", "random.Random(3).random() == 0.23796462709189137"),
    "decimal": ("decimal.getcontext().prec == 28",),
    "temporary directory": ("tempfile.tempdir is None", "tempfile.gettempdir() == os.environ.get('TMPDIR', '/tmp')"),
    "sockets": ("socket.getdefaulttimeout() is None", "socket.gethostbyname('localhost') == '127.0.0.1'"),
    "parent": (
        "os.getppid() == 1",
        "'torch' in open(f'/proc/{os.getppid()}/cmdline').read()",
        "os.getpid() in map(int, open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read().split())",
    ),
    "command line": (
        "'pytest' in open('/proc/self/cmdline').read()",
        "open('/proc/self/comm').read().startswith('python')",
    ),
    "children": (
        *(
            "in_child('import os; print(os.environ.get(\"RANK\"))').strip() in {'0', '1'}",
            "in_child('print(1)') == '1\\n'",
        ),
        *(
            "in_child('import sys; print(len(sys.path) > 6)') == 'True\\n'",
            "open('/proc/self/task/%d/children' % os.getpid()).read() == ''",
        ),
        *(
            "in_child('import os; print(os.getsid(0) == os.getppid())') == 'True\\n'",
            "forked(lambda: os.getsid(0) == os.getppid())",
        ),
        *(
            "in_child('import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)') == 'True\\n'",
        ),
        *("forked(lambda: multiprocessing.parent_process() is None)", "forked(lambda: threading.active_count() == 1)"),
        "in_child('import sys; print(\"pytest_distcompat\" in sys.modules)') == 'False\\n'",
    ),
    "kernel": (
        *(
            "os.nice(0) == 0",
            "len(os.sched_getaffinity(0)) == os.cpu_count()",
            "ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1",
        ),
        *(
            "ctypes.CDLL(None).prctl(37, ctypes.byref(ctypes.c_int()), 0, 0, 0) == 0",
            "os.getpriority(os.PRIO_PROCESS, 0) == 0",
        ),
        *("open('/proc/self/oom_score_adj').read() == '0\\n'", "signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)"),
        *("signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()", "signal.set_wakeup_fd(-1) == -1"),
    ),
    "asyncio": ("raises(RuntimeError, asyncio.get_running_loop)", "asyncio.run(asyncio.sleep(0, 3)) == 3"),
    "meta path": ("len(sys.meta_path) < 5",),
    "names": (
        "__name__.startswith('test_q')",
        "__package__ == ''",
        "__spec__.name == __name__",
        "__spec__.cached is not None",
    ),
    "start of the process": ("time.process_time() < 60", "__debug__", "time.perf_counter() > 0"),
}
#: The same of pytest, in a test or a fixture; ``request`` is there.
OF_PYTEST = {
    "pytest": (
        *("request.config.rootpath == __import__('pathlib').Path(HERE)", "request.config.getoption('maxfail') is None"),
        *("request.config.getoption('verbose') == -1", "request.config.getoption('capture') == 'fd'"),
        *("request.node.name.startswith('test_q')", "request.node.nodeid.startswith('test_q')"),
        *("'PYTEST_CURRENT_TEST' in os.environ", "'(call)' in os.environ['PYTEST_CURRENT_TEST']"),
        *(
            "request.config.pluginmanager.hasplugin('capturemanager')",
            "request.config.pluginmanager.hasplugin('xdist')",
        ),
        *("request.config.getini('addopts') == []", "request.config.inipath.name == 'pytest.ini'"),
        *("len(request.config.invocation_params.args) > 3", "request.config.getoption('keyword') == ''"),
        *(
            "request.getfixturevalue('tmp_path').is_dir()",
            "request.getfixturevalue('tmp_path').name.startswith('test_q')",
        ),
        *(
            "request.getfixturevalue('capsys').readouterr().out == ''",
            "request.getfixturevalue('caplog').records == []",
        ),
        *("request.getfixturevalue('caplog').handler.level == 0", "request.getfixturevalue('recwarn').list == []"),
        *("request.config.option.tbstyle == 'auto'", "request.config.getoption('strict_markers')"),
        *("request.session.testsfailed >= 0", "request.session.shouldstop is False", "request.node.own_markers == []"),
        *(
            "request.node.get_closest_marker('distcompat') is not None",
            "request.config.known_args_namespace is not None",
        ),
        *("request.config.getoption('basetemp') is None", "request.config.getoption('durations') is None"),
    ),
    "terminal reporter": (
        "request.config.pluginmanager.hasplugin('terminalreporter')",
        "request.config.get_terminal_writer() is not None",
    ),
}


@dataclass(frozen=True)
class Question:
    """One question, what it is about, and when it is asked: at ``import``, in a ``fixture`` or in the ``test``."""

    name: str
    about: str
    source: str
    when: str

    def code(self) -> str:
        """Return the test that fails unless the answer is yes."""
        if self.when == "import":
            return (
                f"ANSWER_{self.name} = {self.source}\n\n\ndef test_{self.name}():\n    assert ANSWER_{self.name}\n\n\n"
            )
        if self.when == "fixture":
            fixture = f"@pytest.fixture\ndef of_{self.name}(request):\n    return {self.source}\n\n\n"
            return f"{fixture}def test_{self.name}(of_{self.name}):\n    assert of_{self.name}\n\n\n"
        return f"def test_{self.name}(request):\n    assert {self.source}\n\n\n"


@dataclass(frozen=True)
class Asking:
    """A module that asks some questions."""

    name: str
    libraries: tuple[str, ...]
    questions: tuple[Question, ...]

    def source(self) -> str:
        """Return the whole file."""
        libraries = "\n".join(f"import {name}" for name in self.libraries)
        return HEAD.format(libraries=libraries) + "\n\n" + "".join(question.code() for question in self.questions)


def asking_modules(seed: int, many: int) -> list[Asking]:
    """Return so many modules that import the same libraries, the same ones for the same seed."""
    draw = random.Random(f"questions {seed}")
    libraries = tuple(sorted(draw.sample(LIBRARIES, draw.choice([0, 0, 1, 2]))))
    written = []
    for number in range(many):
        questions = []
        for position in range(draw.randint(2, 4)):
            when = draw.choice(["test", "test", "fixture", "import"])
            about, source = draw.choice(_KINDS)(draw, when)
            questions.append(Question(f"q{number}_{position}", about, source, when))
        written.append(Asking(f"test_q{number}", libraries, tuple(questions)))
    return written


def _of_a_process(draw: random.Random, when: str) -> tuple[str, str]:
    questions = PLAIN if when == "import" else {**PLAIN, **OF_PYTEST}
    # While modules are imported in a fork server, a thread of faulthandler waits there to say where it hangs.
    asked = [about for about in questions if about != "native threads" or when != "import"]
    about = draw.choice(asked)
    return about, draw.choice(questions[about])


def _reachable(draw: random.Random, _: str) -> tuple[str, str]:
    package = draw.choice(list(PACKAGES))
    module = draw.choice(PACKAGES[package])
    form = draw.choice(["{module!r} in vars({package})", "isinstance(vars({package}).get({module!r}), type(os))"])
    # By ``vars``: torch imports some modules once they are asked for, and a later question would find them. A package that the
    # module has not imported is an error, which both have.
    return f"modules of {package}", form.format(package=package, module=module)


def _imported(draw: random.Random, _: str) -> tuple[str, str]:
    # Not of the standard library: code that names a module of it has imported it.
    name = draw.choice([*LIBRARIES, "deepspeed", "triton", "sympy", "networkx", "yaml", "filelock", "psutil", "tqdm"])
    return f"imported {name}", f"{name!r} in sys.modules"


def _variable(draw: random.Random, _: str) -> tuple[str, str]:
    name = draw.choice(VARIABLES)
    form = draw.choice(
        ["{name!r} in os.environ", "os.environ.get({name!r})", "os.getenv({name!r}) in {{'0', '1', ''}}"]
    )
    return f"environment {name}", form.format(name=name)


def _signal(draw: random.Random, _: str) -> tuple[str, str]:
    name = draw.choice(SIGNALS)
    handler = draw.choice(["signal.SIG_DFL", "signal.SIG_IGN", "signal.default_int_handler"])
    return f"signal handlers {name}", f"signal.getsignal(signal.{name}) == {handler}"


def _limit(draw: random.Random, _: str) -> tuple[str, str]:
    name = draw.choice(LIMITS)
    limit = draw.choice(["-1", "resource.getrlimit(resource.{name})[1]", "0", "1024"]).format(name=name)
    return "limits", f"resource.getrlimit(resource.{name})[0] == {limit}"


def _logger(draw: random.Random, _: str) -> tuple[str, str]:
    name = draw.choice(LOGGERS)
    form = draw.choice(
        [
            "logging.getLogger({name!r}).level == 0",
            "logging.getLogger({name!r}).getEffectiveLevel() == logging.WARNING",
            "logging.getLogger({name!r}).propagate",
            "logging.getLogger({name!r}).isEnabledFor(logging.DEBUG)",
            "logging.getLogger({name!r}).hasHandlers()",
        ]
    )
    return f"logger {name}", form.format(name=name)


def _warning(draw: random.Random, _: str) -> tuple[str, str]:
    kind = draw.choice(WARNINGS)
    return "warnings filters", f"raises(Warning, lambda: warnings.warn('of the fuzzer', {kind}))"


_KINDS: tuple[Callable[[random.Random, str], tuple[str, str]], ...] = (
    *(_of_a_process, _of_a_process, _of_a_process, _of_a_process),
    *(_reachable, _reachable, _variable, _imported, _signal, _limit, _logger, _warning),
)

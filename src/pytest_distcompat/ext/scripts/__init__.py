"""Launches of unmodified scripts, such as ``train.py``, on ranks, with a probe inside each rank.

Users call the functions of this package in a test: ``launch("train.py", strategy="fsdp2")`` runs
the script once and returns a ``ScriptRun``, whose ``check("active", "names")`` judges it;
``resume_roundtrip`` and ``parity`` compare several runs. The fixture ``distcompat`` (``plugin``)
calls the same functions with the devices of the pytest session.

Two sides run this package:

- The parent, which is the user's pytest or Python process. ``launching`` makes the command line
  (``torchrun ... train.py``) and runs it. ``result`` reads what the ranks have recorded.
- Every Python process of the script. Environment variables alone put the *probe* into it: code
  that records model, optimizer and files, and changes nothing. ``site/sitecustomize.py`` starts it
  (``instrumentation``, ``wrappers``, ``recorder``).

Because the second kind of process imports this package, its modules are loaded on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.lazy import lazily

if TYPE_CHECKING:
    from pytest_distcompat.ext.scripts.configuration import write_configuration
    from pytest_distcompat.ext.scripts.launching import launch
    from pytest_distcompat.ext.scripts.rank_parity import Parity, parity
    from pytest_distcompat.ext.scripts.result import ScriptRun
    from pytest_distcompat.ext.scripts.resuming import resume_roundtrip
    from pytest_distcompat.ext.scripts.roundtrip import RoundTrip

__all__ = [
    "Parity",
    "RoundTrip",
    "ScriptRun",
    "launch",
    "parity",
    "resume_roundtrip",
    "write_configuration",
]

#: Public name -> the module of this package that defines it.
_HOME = {
    "Parity": "rank_parity",
    "RoundTrip": "roundtrip",
    "ScriptRun": "result",
    "launch": "launching",
    "parity": "rank_parity",
    "resume_roundtrip": "resuming",
    "write_configuration": "configuration",
}
__getattr__ = lazily(__name__, _HOME)

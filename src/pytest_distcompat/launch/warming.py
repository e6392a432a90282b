"""Imported by the fork server, once, and by nobody else: importing it is the only way to run code in one.

https://docs.python.org/3/library/multiprocessing.html#multiprocessing.set_forkserver_preload
"""

from __future__ import annotations

import os

from pytest_distcompat.launch import preload
from pytest_distcompat.launch.process import die_with_parent

die_with_parent()
# Taken out of the environment, so that the ranks do not see it.
preload.main(os.environ.pop("DISTCOMPAT_WARMTH"))

"""What a report says of its session: versions, devices, settings and times.

``Results`` calls ``session_info`` at the end of a session; the return value becomes
``Report.session``, the part ``session`` of the report's JSON. A *lease* is the right of a process
group to use some devices for a while; the session's timeline lists all leases.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.plugin.options import options_of
from pytest_distcompat.plugin.selection import strip_group
from pytest_distcompat.plugin.session import DistcompatSession


def session_info(
    session: DistcompatSession, installed_versions: Mapping[str, str], began: float
) -> dict[str, Any]:
    """Return the part ``session`` of a report, but for what ``Results`` adds to it.

    ``Results`` adds how the session ended and what it has counted itself, such as finished runs.

    Args:
        session: The plugin's session. Its ``began`` is the same time as the argument, on the
            monotonic clock.
        installed_versions: Package to version, as ``{"torch": "2.13.0"}``.
        began: When the session began, in seconds since 1970.

    Returns:
        The keys are ``versions``, ``device`` (``cpu`` or ``cuda``), ``gpu`` (its name),
        ``world_size`` (the default one), ``began`` (UTC, ISO 8601), ``seconds`` (how long the
        session took), ``settings``, ``timeline`` (an entry for each device of each lease: which run
        or test had the device, and when) and ``gaps`` (when a device was free, and why).
        ``schema.json`` in ``report/`` describes all of them.
    """
    from pytest_distcompat.launch import nccl
    from pytest_distcompat.lease import entries, gaps, read_timeline

    session_versions = dict(installed_versions)
    library = nccl.library() if session.gpus else None
    if library is not None:
        session_versions["nccl"] = ".".join(map(str, library.version))
    timeline = entries(session.store_path, session.began)
    # A lease for a run of a suite has the run's directory as ``who``. A report has the run's id,
    # the last part of that path. A lease for a marked test has the node id of the test.
    for entry in timeline:
        # pytest-xdist may append a group, ``@slow``, to a node id; ``strip_group`` takes it off.
        holder = entry["who"].removeprefix(f"{session.runs}{os.sep}")
        entry["who"] = strip_group(session.config, holder)
    return {
        "versions": session_versions,
        "device": session.device,
        "gpu": session.gpu_name,
        "world_size": session.world_size,
        "began": clock.utc(began),
        "seconds": round(clock.now() - session.began, 1),
        "settings": _settings(session),
        "timeline": timeline,
        "gaps": gaps(read_timeline(session.store_path), session.began, clock.now()),
    }


def _settings(session: DistcompatSession) -> dict[str, dict[str, str]]:
    """Return the value of each option, and where it was set.

    Example: ``{"timeout": {"value": "20", "from": "option"}}``.
    """
    settings = {}
    # The names are those of pytest's configuration: ``distcompat_timeout``.
    for option in options_of(session.config):
        name = option.removeprefix("distcompat_")
        setting = session.setting(name)
        settings[name] = {"value": setting.text, "from": setting.origin}
    # Not the text of the option, which may be ``auto``, but what that was on this machine: a reader
    # of the report wants to know whether ranks shared a GPU.
    settings["ranks_per_gpu"]["value"] = str(session.ranks_each)
    return settings

"""Lines of ranks' logs that go from one node to another.

Each rank writes a log, one event a line: ``{"event": "start", "rank": 0, "time": 12.5, ...}``. In a
run over several *nodes* (machines) ranks and watchdogs of one node must know what happens on the
others, such as that a rank has failed. So ``run`` forwards lines, changed by these functions. They
work on the text, because a log has many lines and most are large.
"""

from __future__ import annotations

import json
import re

#: Events that the other nodes need: all but the large ones, and those with process numbers of this
#: node.
_NOT_FORWARDED = re.compile(r'\{"event": "(start|action|snapshot)"')
_TIME = re.compile(r'"time": (\d+\.\d+)')


def is_forwarded(line: str) -> bool:
    """Tell whether other nodes need the line of an event."""
    return _NOT_FORWARDED.match(line) is None


def shifted(line: str, seconds: float) -> str:
    """Return the line of an event with its time by another node's clock.

    ``seconds`` is how far that clock is ahead.
    """
    if not seconds:
        return line

    def by_the_other_clock(match: re.Match[str]) -> str:
        time = float(match[1]) + seconds
        return f'"time": {time}'

    return _TIME.sub(by_the_other_clock, line, count=1)


def without_pid(line: str) -> str:
    """Return the line without the number of its process, which means nothing on another node."""
    if line.startswith('{"event": "done"'):
        return json.dumps({**json.loads(line), "pid": None})
    return line

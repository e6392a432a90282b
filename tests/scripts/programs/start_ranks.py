"""A launcher of nobody's: it starts processes that have RANK in their environment, and fails if one of them does.

With ``--leave`` it goes as soon as they are there, with ``--ignore`` it says that all is well.
"""

import os
import subprocess
import sys

count, *line = sys.argv[1:]
leave = "--leave" in line
ranks = [
    subprocess.Popen(
        [sys.executable, *line],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": count, "LOCAL_RANK": str(rank)},
        start_new_session="--session" in line,
        stdout=subprocess.PIPE if leave else None,
    )
    for rank in range(int(count))
]
if leave:
    # By the first thing that it says a rank has announced itself.
    first_lines = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    os._exit(0)
worst = max(abs(rank.wait()) for rank in ranks)
sys.exit(0 if "--ignore" in line else worst)

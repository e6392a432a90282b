"""A launcher of nobody's: it starts processes that have RANK in their environment, and fails if one of them does."""

import os
import subprocess
import sys

count, *line = sys.argv[1:]
ranks = [
    subprocess.Popen(
        [sys.executable, *line],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": count, "LOCAL_RANK": str(rank)},
        start_new_session="--session" in line,
    )
    for rank in range(int(count))
]
worst = 0 if "--leave" in line else max(abs(rank.wait()) for rank in ranks)
sys.exit(0 if "--ignore" in line else worst)

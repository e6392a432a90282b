"""Run two commands by accelerate's ``execute_subprocess_async`` and print the results as JSON.

``sleep``: one that outlives its time limit and then leaves a file. ``killed``: one that is killed by SIGKILL.
"""

import json
import sys
from pathlib import Path

from accelerate.test_utils import execute_subprocess_async

mark = Path(sys.argv[1])
outlives = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
results = {}
for name, source, limit in (("outlives", outlives, 1), ("killed", killed, 60)):
    try:
        execute_subprocess_async([sys.executable, "-c", source], timeout=limit, quiet=True, echo=False)
    except Exception as error:
        results[name] = repr(error)
    else:
        results[name] = "green"
print(json.dumps({**results, "waited": mark.exists()}))

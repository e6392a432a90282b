"""Read the fields of sources in a process of its own.

``rules.read`` starts it, as ``python -m pytest_distcompat.ext.upstream.sweep '[{"name": "AdamW",
"target": "torch.optim.AdamW", ...}]'``: a pytest process imports neither torch nor what it tests.
The argument is a JSON list of sources, objects of libraries; the answer on the standard output is
a JSON list of fields, their settings: ``[{"name": "AdamW.amsgrad", "values": ["true"], ...}]``.
"""

import dataclasses
import json
import os
import sys

from pytest_distcompat.decode import decode
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.ext.upstream.sweep.reading import read_fields

if __name__ == "__main__":
    # Libraries write to the standard output when they are imported. So the answer goes to a copy of
    # it, and what else is written there goes to the standard error.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    data = json.loads(sys.argv[1])
    sources = [decode(Source, source) for source in data]
    json.dump([dataclasses.asdict(field) for field in read_fields(sources)], answer)
    answer.close()

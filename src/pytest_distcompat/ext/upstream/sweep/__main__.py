"""Read the fields of sources in a process of its own.

A pytest process imports neither torch nor what it tests. The argument is a JSON list of sources;
the answer on the standard output is one of fields.
"""

import dataclasses
import json
import os
import sys

from pytest_distcompat.decode import decode
from pytest_distcompat.ext.upstream.sweep.fields import Source, read_fields

if __name__ == "__main__":
    # Libraries write to the standard output when they are imported.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    data = json.loads(sys.argv[1])
    sources = [decode(Source, source) for source in data]
    json.dump([dataclasses.asdict(field) for field in read_fields(sources)], answer)
    answer.close()

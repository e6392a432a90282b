"""Entry point of ``python -m pytest_distcompat.cli``.

For where the script ``distcompat`` is not on the PATH.
"""

import sys

from pytest_distcompat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

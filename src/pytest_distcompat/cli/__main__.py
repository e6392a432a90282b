"""``python -m pytest_distcompat.cli``: the same command, where its script is not on the PATH."""

import sys

from pytest_distcompat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""Nothing to do: the directory of a conftest.py is importable, in the ranks too."""

"""Items of a ``CompatSuite``: which there are, and how one runs."""

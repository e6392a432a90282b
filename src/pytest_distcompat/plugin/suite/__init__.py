"""Items of a ``CompatSuite``: which there are (``cases``), and how one runs (``run``)."""

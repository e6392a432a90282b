"""Guided search for cells and calls that reach library code which no cell reaches.

``command`` is ``distcompat search``. ``space`` draws candidates, ``trial`` runs and judges one,
``guide`` decides which comes next and what is kept, and ``state`` stores that in a file.
"""

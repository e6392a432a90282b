"""Parallelism within a model.

Of layers (``tp``), sequences (``cp``), experts (``ep``) and stages (``pp``): options of a cell, one
configuration under test, as ``fsdp2-fp32-w4-tp_2``. Each module says which cells it cannot split,
and has functions by which the built-in drivers split a model on each rank.
"""

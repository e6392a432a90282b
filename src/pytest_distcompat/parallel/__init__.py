"""Parallelism within a model.

Of layers (``tp``), sequences (``cp``), experts (``ep``) and stages (``pp``).
"""

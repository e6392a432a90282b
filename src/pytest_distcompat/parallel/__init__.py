"""Parallelism within a model: of layers (``tp``), sequences (``cp``), experts (``ep``) and stages (``pp``)."""

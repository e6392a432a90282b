"""Simulated ranks, without peers and without values (``--distcompat-simulate 1024``).

Processes take the part of each rank that differs, one after the other. ``substitute`` says what can
be simulated, ``launcher`` starts the simulation in place of ranks, ``fake_ranks`` is its main, and
``sent`` computes what a rank sends.
"""

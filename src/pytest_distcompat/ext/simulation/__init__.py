"""Simulated ranks: each rank that differs is taken by one process after the other, without peers and without values."""

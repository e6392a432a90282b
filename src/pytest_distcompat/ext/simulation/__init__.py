"""Simulated ranks, without peers and without values.

Processes take the part of each rank that differs, one after the other.
"""

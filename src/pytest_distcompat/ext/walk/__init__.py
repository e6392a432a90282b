"""Walks: sequences of calls of a live trainer, drawn by Hypothesis.

They are compared with one process that makes the same calls.
"""

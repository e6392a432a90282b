"""Walks: sequences of calls of a live trainer, drawn by Hypothesis, and compared with one process that does the same."""

"""Guided search for cells and calls that reach branches of the stack which no cell reaches.

Candidates that reach such branches are kept, and varied.
"""

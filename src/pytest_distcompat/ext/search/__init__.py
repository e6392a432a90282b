"""Guided search: candidates that reach branches of the stack which no cell of a map reaches are kept, and varied."""

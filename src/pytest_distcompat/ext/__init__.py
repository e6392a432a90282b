"""Extensions: each folder can be deleted, and all else works without it.

The rest of the package imports nothing from here.
"""

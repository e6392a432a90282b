"""Reach: which functions and branches of the installed stack the cells of suites execute.

Nothing of it but its plugin is imported without ``--distcompat-reach`` or the command ``distcompat
reach``.
"""

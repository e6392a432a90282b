"""Runs that span nodes.

They need pytest's process, a node agent on each node, and the authenticated channel between them.
"""

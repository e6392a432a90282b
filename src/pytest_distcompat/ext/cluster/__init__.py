"""Runs that span nodes: pytest's process, a node agent on each node, and the authenticated channel between them."""

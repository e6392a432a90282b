"""Runs that span several machines, called nodes.

They need pytest's process (``launcher``, ``membership``, ``run``), an agent on each node, which
starts the ranks there (``agent``), and an authenticated channel between them (``channel``).
``plugin`` adds the options to pytest, ``command`` the commands ``join`` and ``sbatch``.
"""

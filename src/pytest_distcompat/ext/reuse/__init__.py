"""Ranks that tests share (``--distcompat-reuse module``).

The ranks of one run, a process group from start to end, do the requests of several tests one after
the other. They end once a test leaves them changed. In pytest's process ``shared`` says which tests
share ranks, ``keeper`` starts and ends these, and ``reused_ranks`` sends them requests. On the
ranks ``request_loop`` performs the requests and ``rank_item`` runs a test; ``process_state`` and
``library_state`` are the state that a test must leave as it was.
"""

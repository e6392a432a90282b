"""Ranks that tests share: a run whose ranks do the requests of several tests, and end once a test leaves them changed."""

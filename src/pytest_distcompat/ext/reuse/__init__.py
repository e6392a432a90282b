"""Ranks that tests share.

The ranks of one run do the requests of several tests, and end once a test leaves them changed.
"""

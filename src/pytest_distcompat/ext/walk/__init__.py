"""Walks: sequences of calls of a live trainer, such as ``step(), save(), step()``, drawn at random.

Hypothesis draws them (``explore``). Each is compared with one process that makes the same calls
(``claim``). ``check`` and ``profile`` add walks to suites, ``command`` adds ``distcompat walk``.
"""

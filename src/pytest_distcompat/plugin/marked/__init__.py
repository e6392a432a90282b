"""A test marked with ``@pytest.mark.distcompat``: ``declare``, then ``run``, then ``outcome``.

``phase`` is what a rank logs of the test: ``reports`` and ``subtests`` make it on the rank,
``merge`` reads it in pytest's process and makes the outcome.
"""

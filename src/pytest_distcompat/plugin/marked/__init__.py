"""A test marked with ``@pytest.mark.distcompat``: ``declare``, then ``run``, then ``outcome``.

``phase`` is what a rank logs of the test; ``outcome`` reads it.
"""

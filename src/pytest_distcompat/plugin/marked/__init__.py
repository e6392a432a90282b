"""A test marked with ``@pytest.mark.distcompat``, in three rooms: ``declare``, ``run``, ``outcome``.

``phase`` is what a rank logs of the test; ``outcome`` reads it.
"""

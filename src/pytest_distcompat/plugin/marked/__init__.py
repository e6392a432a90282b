"""The parent's side of ``@pytest.mark.distcompat``: items, outcomes of their ranks, scheduling."""

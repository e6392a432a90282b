"""``distcompat init``: writes a suite, pytest settings and a workflow into a repository."""

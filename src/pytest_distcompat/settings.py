"""Name that users import for drivers with swept settings: ``Source``.

A driver (the trainer under test) may name classes of libraries, such as ``TrainingArguments``,
whose settings the command ``distcompat settings`` then tries one after the other. ``Source``
describes such a class. Its code is in the extension ``ext.upstream.sweep``.
"""

from pytest_distcompat.ext.upstream.sweep.fields import Source

__all__ = ["Source"]

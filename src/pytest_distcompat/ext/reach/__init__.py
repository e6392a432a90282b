"""Reach: which functions and branches of the installed libraries the test cells execute.

``pytest --distcompat-reach FILE`` traces the ranks and writes a map (``plugin``, ``tracer``,
``collect``, ``store``); ``distcompat reach FILE`` shows it (``command``, ``text``). Nothing of this
package but its plugin is imported without one of them.
"""

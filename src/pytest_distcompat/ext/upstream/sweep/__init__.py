"""The sweep: settings of the installed libraries as cells of the matrix.

With the law that judges them, and the profile of that name.
"""

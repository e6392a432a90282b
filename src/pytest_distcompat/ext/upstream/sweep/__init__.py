"""The sweep: settings of the installed libraries as cells, the law that judges them, and the profile of that name."""

"""The sweep: every setting of the installed libraries, tried one at a time.

A setting is a field of an object that a driver, the class by which a trainer is tested, makes:
``ds_config.zero_optimization.overlap_comm=false``. Each value of each setting becomes a cell, a
configuration under test. The modules, in the order of the data:

- ``fields``: which objects a driver makes (``Source``), and their fields (``Field``);
- ``reading``, with ``_members``, ``_keys``, ``_variables`` and ``values``: reads the fields from
  the installed libraries, in a process of its own (``__main__``);
- ``rules``: what ``rules.json`` says of each field; the result is a ``Setting``;
- ``profile``: the profile ``sweep``, the cells of all settings; ``slice``: the few that every
  session has;
- ``law``: how checks judge cells with settings;
- ``command`` and ``pairs``: ``distcompat settings``, which lists settings and tries pairs of them.
"""

"""The probe: reads the live model, the optimizer and the files on disk, on each rank.

It reads them itself, never through the trainer's own code: a test of a trainer by its own loading
code would prove nothing. It takes part in no collective and changes nothing, so it can run after
any action (``build``, ``step``, ``save``, ...) on any rank. ``worker`` calls it for a suite,
``ext.scripts`` for a user's script. What it reads goes into ``trace.Snapshot``.

- ``snapshot`` reads a live trainer, by ``live`` (the model) and ``optimizer``;
- ``extra`` reads further state that a driver names;
- ``observe`` records what happens inside a step, by hooks of torch;
- ``files`` reads checkpoints and exports;
- ``tensors`` computes digests, and ``layouts`` says which part of a tensor a rank holds.
"""

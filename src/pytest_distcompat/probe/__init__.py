"""The probe: reads the live model, the optimizer and the files on disk.

It reads them itself, never through the trainer's own code: a test of a trainer by its own loading
code would prove nothing. It takes part in no collective and changes nothing, so it can run after
any action on any rank.
"""

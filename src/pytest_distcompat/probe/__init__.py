"""The probe: reads the live model, the optimizer and the files on disk, never through the trainer's own code.

It takes part in no collective and changes nothing, so it can run after any action on any rank.
"""

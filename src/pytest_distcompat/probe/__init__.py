"""The probe: reads the live model, the optimizer and the files on disk, never through the trainer's own code.

It takes part in no collective and changes nothing, so it can run after any action on any rank.
"""

from pytest_distcompat.probe.files import read_files, read_saved
from pytest_distcompat.probe.live import read_model, read_unwrapped
from pytest_distcompat.probe.observe import Observer, digest_of_inputs
from pytest_distcompat.probe.optimizer import read_optimizer, read_scheduler, torch_optimizer
from pytest_distcompat.probe.snapshot import sample

__all__ = [
    "Observer",
    "digest_of_inputs",
    "read_files",
    "read_model",
    "read_optimizer",
    "read_saved",
    "read_scheduler",
    "read_unwrapped",
    "sample",
    "torch_optimizer",
]

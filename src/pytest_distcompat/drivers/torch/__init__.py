"""The driver of plain torch: the names of ``ext.upstream.drivers.torch`` that users import."""

from pytest_distcompat.ext.upstream.drivers.torch import TorchCalls, TorchDriver

__all__ = ["TorchCalls", "TorchDriver"]

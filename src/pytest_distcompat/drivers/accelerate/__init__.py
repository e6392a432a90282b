"""The driver of accelerate: the names of ``ext.upstream.drivers.accelerate`` that users import."""

from pytest_distcompat.ext.upstream.drivers.accelerate import AccelerateCalls, AccelerateDriver
from pytest_distcompat.launch.accelerate_cpu import on_cpu

__all__ = ["AccelerateCalls", "AccelerateDriver", "on_cpu"]

"""The driver of DeepSpeed: the names of ``ext.upstream.drivers.deepspeed`` that users import."""

from pytest_distcompat.ext.upstream.drivers.deepspeed import DeepSpeedCalls, DeepSpeedDriver

__all__ = ["DeepSpeedCalls", "DeepSpeedDriver"]

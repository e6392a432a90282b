"""SyncBatchNorm, whose statistics are those of the rows of all ranks."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

# Measured with torch 2.13, whose DDP says of the module: "SyncBatchNorm layers only work with GPU modules".
SYNCBATCHNORM = classifier(
    "syncbatchnorm",
    "SyncBatchNorm",
    frozen_modules=("inlet",),
    only_float32=True,
    one_batch=True,
    not_on_cpu="torch's SyncBatchNorm refuses CPU tensors: 'SyncBatchNorm expected input tensor to be on GPU or XPU'",
    order=9,
)

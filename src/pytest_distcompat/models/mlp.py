"""MLP as nn.Module: odd sizes (uneven shards), a persistent and a non-persistent buffer, a frozen layer."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

#: Thirteen features are cut unevenly.
_TP_PLAN = {**dict.fromkeys(("inlet", "blocks.*.linear"), "colwise_gather"), "outlet": "rowwise_split"}

MLP_MODEL = classifier("mlp", "MLP", frozen_modules=("inlet",), ignored_module="frozen", tp_plan=_TP_PLAN, order=2)

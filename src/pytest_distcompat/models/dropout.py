"""Dropout in each block: every forward draws random numbers."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

#: Every activation that is dropped is whole on each rank.
_TP_PLAN = {**dict.fromkeys(("inlet", "block.linear"), "colwise_gather"), "outlet": "rowwise_split"}

DROPOUT = classifier("dropout", "Dropout", frozen_modules=("inlet",), tp_plan=_TP_PLAN, random=True, order=7)

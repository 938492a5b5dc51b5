"""Advantages, losses and packing: functions without state."""

from agentscope_tuner.algorithms.advantages import Credit, Datum, build_datums, compute_advantages, weigh
from agentscope_tuner.algorithms.packing import PackedTree, common_prefix, pack

__all__ = ["Credit", "Datum", "PackedTree", "build_datums", "common_prefix", "compute_advantages", "pack", "weigh"]

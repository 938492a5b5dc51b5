"""The settings of a run: what there is (`schema`), and how it is read (`reading`)."""

from agentscope_tuner.config.reading import load_config, parse_config
from agentscope_tuner.config.schema import (
    AlgorithmConfig,
    AlgorithmName,
    BackendName,
    BranchingConfig,
    CheckpointConfig,
    DatasetConfig,
    EngineConfig,
    LoraConfig,
    MonitorName,
    OpponentPoolConfig,
    RolesConfig,
    TrinityConfig,
    TunerConfig,
    TunerModelConfig,
    WorkflowConfig,
)

__all__ = [
    "AlgorithmConfig",
    "AlgorithmName",
    "BackendName",
    "BranchingConfig",
    "CheckpointConfig",
    "DatasetConfig",
    "EngineConfig",
    "LoraConfig",
    "MonitorName",
    "OpponentPoolConfig",
    "RolesConfig",
    "TrinityConfig",
    "TunerConfig",
    "TunerModelConfig",
    "WorkflowConfig",
    "load_config",
    "parse_config",
]

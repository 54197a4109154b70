"""zshard: train a PyTorch model that does not fit on one device, faster and in less memory.

``model = zshard.wrap(model)`` shards parameters, gradients and optimizer states over the ranks.
"""

from . import extension, ops, reference  # noqa: F401  # extension: first
from .calls.clip import clip_grad_norm_
from .calls.describe import describe
from .calls.memory_use import Memory, memory
from .calls.session import method, no_sync, reset, stats, trace
from .calls.whole import full_grad, full_param, full_params, local_shards, mark_updated
from .calls.whole_state import state_dict
from .checkpoint import Loaded, SaveHandle, export, latest, load, load_weights, save
from .errors import (
    CheckpointError,
    CommError,
    Error,
    InputError,
    MismatchError,
    MissingPackage,
    OptimizerError,
    PlanError,
    ShardedAccessError,
    StateError,
    WrapError,
)
from .optim import SGD, Adam, AdamW
from .optimizers.scaler import GradScaler
from .planning import Alternative, Fit, Link, Machine, Plan, plan
from .precision import Precision
from .tracing.file import merge_traces
from .tracing.trace import Trace
from .transports.counters import CommStats
from .wrap import wrap

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Alternative",
    "CheckpointError",
    "CommError",
    "CommStats",
    "Error",
    "Fit",
    "GradScaler",
    "InputError",
    "Link",
    "Loaded",
    "Machine",
    "Memory",
    "MismatchError",
    "MissingPackage",
    "OptimizerError",
    "Plan",
    "PlanError",
    "Precision",
    "SaveHandle",
    "ShardedAccessError",
    "StateError",
    "Trace",
    "WrapError",
    "clip_grad_norm_",
    "describe",
    "export",
    "full_grad",
    "full_param",
    "full_params",
    "latest",
    "load",
    "load_weights",
    "local_shards",
    "mark_updated",
    "memory",
    "merge_traces",
    "method",
    "no_sync",
    "ops",
    "plan",
    "reference",
    "reset",
    "save",
    "state_dict",
    "stats",
    "trace",
    "wrap",
]

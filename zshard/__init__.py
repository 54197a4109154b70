"""zshard: train a PyTorch model that does not fit on one device, faster and in less memory.

``model = zshard.wrap(model)`` shards parameters, gradients and optimizer states over the ranks.
"""

from .clip import clip_grad_norm_
from .comm import CommStats
from .errors import (
    CommError,
    Error,
    InputError,
    MismatchError,
    OptimizerError,
    ShardedAccessError,
    StateError,
    WrapError,
)
from .optim import SGD, Adam, AdamW
from .precision import Precision
from .scaler import GradScaler
from .session import memory, method, no_sync, reset, stats, trace
from .state import state_dict
from .whole import full_grad, full_param, full_params, local_shards, mark_updated
from .wrap import wrap

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CommError",
    "CommStats",
    "Error",
    "GradScaler",
    "InputError",
    "MismatchError",
    "OptimizerError",
    "Precision",
    "ShardedAccessError",
    "StateError",
    "WrapError",
    "clip_grad_norm_",
    "full_grad",
    "full_param",
    "full_params",
    "local_shards",
    "mark_updated",
    "memory",
    "method",
    "no_sync",
    "reset",
    "state_dict",
    "stats",
    "trace",
    "wrap",
]

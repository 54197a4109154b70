"""Typed errors. Every one says what is wrong, with the values, and what to do about it."""

from __future__ import annotations


class Error(RuntimeError):
    """Base class of every error that zshard raises."""


class InputError(Error, ValueError):
    """An argument that cannot be used: a wrong type, shape, dtype, name or value."""


class WrapError(Error):
    """The model cannot be wrapped as it is, or is not wrapped where it has to be."""


class MismatchError(Error):
    """Ranks differ where they must not: in the model, its values, what they call, or save."""


class ShardedAccessError(Error):
    """A whole-parameter operation was asked of a parameter of which a rank holds only a shard."""


class StateError(Error):
    """An operation that the state of the model, of a unit, or of the step does not allow."""


class CommError(Error):
    """A collective failed or timed out; names the unit, the phase and the rank that saw it."""


class OptimizerError(Error):
    """An optimizer that cannot work on shards, or whose state does not fit the model."""


class MissingPackage(Error, ImportError):
    """A package that only this needs is not installed; names it, and how to install it."""


class CheckpointError(Error):
    """A checkpoint that cannot be written or read; names the path, the file and the tensor."""


class PlanError(Error):
    """A model in training takes other memory than was planned; names the kinds and the units."""

"""The process groups that ``zshard.wrap(mesh=...)`` stands for."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError


class Groups(NamedTuple):
    """The process groups that collectives run over; None is a single rank."""

    replicas: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    global_ranks: tuple[int, ...]  # of all, replica by replica


def _require_one_order(mesh: DeviceMesh) -> None:
    """Refuse a 2-D mesh whose rows, or columns, have their ranks in different orders.

    torch sorts the ranks of a group. So the replicas of a shard would not be those of one column,
    and not all groups would number their ranks alike.
    """
    for dim, name in enumerate(("columns", "rows")):
        order = mesh.mesh.argsort(dim=dim)
        if not torch.equal(order, order.narrow(1 - dim, 0, 1).expand_as(order)):
            raise InputError(
                f"mesh={mesh.mesh.tolist()}: its {name} have their ranks in different orders, and "
                "torch sorts the ranks of a process group, so that replicas would hold other "
                "shards than the mesh says. Order them alike, for instance ascending."
            )


def warn_if_alone(mesh: dist.ProcessGroup | DeviceMesh | None) -> None:
    """Say so in the log where one of several ranks has been wrapped as a rank alone.

    A process that a launcher has started, and that has no process group, may be meant to be alone.
    """
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if mesh is None and dist.group.WORLD is None and rank and size.isdecimal() and int(size) > 1:
        logging.getLogger("zshard").warning(
            "RANK=%s and WORLD_SIZE=%s, in the environment, say that this process is one of "
            "several ranks, but there is no process group: the model is wrapped for this rank "
            "alone, and each trains one of its own. Call torch.distributed.init_process_group "
            "before zshard.wrap (or make transformers' TrainingArguments, or accelerate's "
            "Accelerator, which do).",
            rank,
            size,
        )


def warn_of_later_group() -> None:
    """As ``warn_if_alone``, for a model that was wrapped before there was a process group."""
    if (size := dist.get_world_size()) > 1:
        logging.getLogger("zshard").warning(
            "a model was wrapped before there was a process group, which now has %d ranks: it is "
            "wrapped for this rank alone, and each trains one of its own. Call "
            "torch.distributed.init_process_group before zshard.wrap.",
            size,
        )


def groups_of(mesh: dist.ProcessGroup | DeviceMesh | None) -> Groups:
    """The groups of replicas and of shards that ``mesh`` stands for.

    Args:
        mesh: None, the default process group if there is one; a ProcessGroup or a 1-D DeviceMesh,
            the sharding group; a 2-D DeviceMesh, (replicate, shard).

    Raises:
        InputError: for a mesh of more than two dimensions, of another type, or without this rank;
            for a 2-D one whose rows, or columns, order their ranks differently.
    """
    if mesh is None:
        return _sharded_over(dist.group.WORLD)
    if isinstance(mesh, DeviceMesh):
        if mesh.get_coordinate() is None:
            raise InputError(f"mesh={mesh.mesh.tolist()}: this rank is not in it")
        if mesh.ndim == 1:
            return _sharded_over(mesh.get_group())
        if mesh.ndim == 2:
            _require_one_order(mesh)
            ranks = mesh.mesh.sort(dim=0).values.sort(dim=1).values  # as torch does in each group
            return Groups(mesh.get_group(0), mesh.get_group(1), tuple(ranks.flatten().tolist()))
        raise InputError(
            f"mesh has {mesh.ndim} dimensions; zshard.wrap takes a 1-D mesh to shard over, or a "
            "2-D one, (replicate, shard)"
        )
    if isinstance(mesh, dist.ProcessGroup):
        return _sharded_over(mesh)
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("mesh: this rank is not a member of the process group")
    raise InputError(f"mesh={mesh!r}: expected None, a ProcessGroup, or a 1-D or 2-D DeviceMesh")


def _sharded_over(group: dist.ProcessGroup | None) -> Groups:
    global_ranks = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
    return Groups(None, group, global_ranks)

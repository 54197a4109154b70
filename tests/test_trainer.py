"""README, Under a trainer: transformers' Trainer trains a wrapped model as it does its own DDP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ranks
import third_party
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import zshard

ranks.PRELOADED += ["transformers.trainer", *third_party.MODULES]

STEPS, EVERY = 4, 2


def trained(rank: int, size: int, folder: str, accumulate: int, wrapped: bool) -> list[object]:
    """Losses, gradient norms and the weights after ``STEPS`` steps."""
    # As torchrun sets them; nothing is asked for at the address, as there is a group.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.trainer_callback import TrainerCallback

    torch.manual_seed(0)
    sizes = dict(vocab_size=37, hidden_size=18, intermediate_size=29, num_hidden_layers=3)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3, num_key_value_heads=1))
    tokens = torch.randint(3, 37, (64, 9))
    if wrapped:
        zshard.wrap(model)
    make = zshard.AdamW if wrapped else torch.optim.AdamW
    opt = make(model.parameters(), lr=3e-3, weight_decay=0.1)

    class Save(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
            step = state.global_step  # type: ignore[attr-defined]
            if wrapped and step % EVERY == 0:
                zshard.save(f"{folder}/step-{step}", model, opt, extra={"step": step}, keep=1)

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        model, arguments, train_dataset=data, optimizers=(opt, None), callbacks=[Save()]
    )
    if wrapped:
        trainer.accelerator.prepare_model = lambda model, **kwargs: model
        trainer.accelerator.clip_grad_norm_ = lambda params, *norm: zshard.clip_grad_norm_(
            model, *norm
        )
    trainer.train()
    logged = [
        torch.tensor([each["loss"], each["grad_norm"]])
        for each in trainer.state.log_history
        if "grad_norm" in each
    ]
    assert dist.get_world_size() == size
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) is not wrapped
    assert len(logged) == STEPS
    values = zshard.state_dict(model, all_ranks=True) if wrapped else model.state_dict()
    return [*logged, *(value.clone() for value in values.values())]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_wrapped_model_trains_under_transformers_trainer_as_under_its_ddp(
    accumulate: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    ours = run_ranks(trained, 2, folder, accumulate, True, timeout=120)
    theirs = run_ranks(trained, 2, folder, accumulate, False, timeout=120)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert str(zshard.latest(tmp_path)).endswith(f"step-{STEPS}")

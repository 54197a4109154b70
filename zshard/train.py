"""One rank of ``zshard train``: the loop, and what it prints and writes."""

from __future__ import annotations

import contextlib
import math
import time
from datetime import datetime
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import zshard

from .data import Batch, Corpus, find_files
from .errors import Error, InputError
from .gpt import GPT, generate
from .job import Job, Place, choose_device
from .metrics import (
    Held,
    MetricsLog,
    StepMetrics,
    Validation,
    ddp_memory,
    memory_table,
    plot_loss,
    read_metrics,
)
from .options import TrainOptions
from .param import Sharded
from .snapshot import Header, OptimizerState, RankState, load_rank, read_header, save_snapshot
from .streams import upload

_MAX_GRAD_NORM = 1.0
_VALIDATION_BATCHES = 8  # a rank
_WARMUP_SHARE = 0.05
_FINAL_LR_SHARE = 0.1
_PROMPT_BYTES = 64


class TrainError(Error):
    """Training cannot go on."""


class Run:
    """A training run on one rank: model, optimizer, text, and the steps taken so far."""

    def __init__(self, job: Job, options: TrainOptions, corpus: Corpus) -> None:
        """Builds and wraps the model, or takes it and the step from the checkpoint to resume."""
        self.job, self.options, self.corpus = job, options, corpus
        torch.manual_seed(options.seed)
        precision = zshard.Precision.bf16() if options.precision == "bf16" else zshard.Precision()
        plain = GPT(options.model_config()).to(job.device)
        self.model: nn.Module = zshard.wrap(plain, strategy=options.strategy, precision=precision)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        # Norms' weights are not decayed, as everywhere.
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = zshard.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
        self.step = 0
        if options.resume:
            self._restore(Path(options.resume))

    def take_step(self) -> StepMetrics:
        """One optimizer step over ``accumulate`` micro-batches of every rank."""
        options, stats = self.options, zshard.stats(self.model)
        stats.reset()
        began = time.perf_counter()
        rate = learning_rate(options, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = torch.zeros((), device=self.job.device)
        for micro_step in range(options.accumulate):
            last = micro_step == options.accumulate - 1
            batch = self.corpus.train_batch(
                options.batch,
                options.seq,
                seed=options.seed,
                step=self.step,
                micro_step=micro_step,
                rank=self.job.rank,
            )
            with contextlib.nullcontext() if last else zshard.no_sync(self.model):
                part = self.loss(batch) / options.accumulate
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        norm = zshard.clip_grad_norm_(self.model, _MAX_GRAD_NORM)
        mean = self.job.mean(loss)
        if not math.isfinite(mean):
            raise TrainError(
                f"the loss is {mean} at step {self.step + 1}: start again with a lower --lr "
                f"(it is {options.lr}), or resume from the last checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        norm_value = float(norm)  # waits for the device, so that the clock below tells the truth
        seconds = time.perf_counter() - began
        tokens = options.batch * options.seq * options.accumulate * self.job.world_size
        return StepMetrics(
            step=self.step,
            loss=mean,
            grad_norm=norm_value,
            learning_rate=rate,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            exposed_percent=None
            if self.job.device.type == "cuda"
            else 100 * stats.exposed_seconds / seconds,
        )

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a micro-batch, in nats per byte."""
        logits = self.model(upload(batch.tokens, self.job.device))
        targets = upload(batch.targets, self.job.device)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over a fixed sample of the validation text, shared out over the ranks."""
        count = _VALIDATION_BATCHES * self.job.world_size
        total = torch.zeros((), device=self.job.device)
        for index in range(self.job.rank, count, self.job.world_size):
            total += self.loss(
                self.corpus.validation_batch(
                    self.options.batch, self.options.seq, index=index, count=count
                )
            )
        return self.job.mean(total / _VALIDATION_BATCHES)

    def memory_table(self) -> str:
        """What each rank holds beside what DDP would; every rank calls this."""
        peak = zshard.memory(self.model)["peak"]
        states = _local_states(self.optimizer)["state"].values()
        held = Held(
            weights=peak["parameters"] + peak["master"],
            gradients=peak["gradients"],
            optimizer=sum(t.nbytes for s in states for t in s.values() if isinstance(t, Tensor)),
            buffers=peak["full_buffers"] + peak["reduce_buffers"],
        )
        ranks = cast("list[Held]", self.job.gather(held))
        low = self.options.precision == "bf16"
        return memory_table(ranks, ddp_memory(self.parameters, low_precision=low))

    def save(self, folder: Path) -> Path:
        """Writes a checkpoint; every rank calls this."""
        header = Header(
            step=self.step,
            ranks=self.job.world_size,
            checksum=self.corpus.checksum,
            options=self.options.as_json(),
        )
        state = RankState(zshard.local_shards(self.model), _local_states(self.optimizer))
        return save_snapshot(folder, header, state, rank=self.job.rank, barrier=self.job.barrier)

    def _restore(self, snapshot: Path) -> None:
        header = read_header(snapshot)
        if header.checksum != self.corpus.checksum:
            raise InputError(
                f"the text is not the one that {snapshot} was trained on (CRC-32 "
                f"{self.corpus.checksum:08x}, not {header.checksum:08x}): give the same --data"
            )
        state = load_rank(snapshot, rank=self.job.rank, ranks=self.job.world_size)
        live = zshard.local_shards(self.model)
        expected = {name: tuple(part.shape) for name, part in live.items()}
        found = {name: tuple(part.shape) for name, part in state.master.items()}
        if expected != found:
            names = sorted(n for n in expected | found if expected.get(n) != found.get(n))
            raise InputError(
                f"rank {self.job.rank}'s shards in {snapshot} do not fit the model, first at "
                f"{names[0]}: {found.get(names[0])} stored, {expected.get(names[0])} needed"
            )
        for name, part in live.items():
            part.copy_(state.master[name])
        zshard.mark_updated(self.model)
        self.optimizer.load_state_dict(dict(state.optimizer))
        self.step = header.step


def _local_states(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The optimizer's state_dict with this rank's slices in place of sharded tensors."""
    found = cast(OptimizerState, optimizer.state_dict())
    for number, state in found["state"].items():
        found["state"][number] = {
            name: value.local if isinstance(value, Sharded) else value
            for name, value in state.items()
        }
    return found


def learning_rate(
    options: TrainOptions,
    step: int,  # 0 is the first
) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(_WARMUP_SHARE * options.steps))
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    share = _FINAL_LR_SHARE + (1 - _FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    return options.lr * share


def train(options: TrainOptions, place: Place) -> None:
    """Trains, on the rank that ``place`` says; returns when the run is complete.

    Raises:
        InputError: for text or a checkpoint that cannot be used.
        TrainError: when the loss is no longer finite.
    """
    corpus = Corpus.read(find_files(options.data), options.seq)
    job = Job(place, choose_device(options.device))
    run = Run(job, options, corpus)
    _announce(run)
    out = Path(options.out or str(job.gather(_new_folder())[0]))
    _loop(run, out)
    _finish(run, out)
    job.leave()


def _new_folder() -> str:
    return f"runs/{datetime.now():%Y-%m-%d-%H%M%S}"


def _announce(run: Run) -> None:
    job, options, corpus = run.job, run.options, run.corpus
    config = options.model_config()
    job.say(
        f"model: GPT of {run.parameters / 1e6:.2f}M parameters ({config.layers} layers, width "
        f"{config.width}, {config.heads} heads), {options.strategy}, {options.precision}\n"
        f"ranks: {job.world_size} on {job.device.type}, {torch.get_num_threads()} threads each\n"
        f"text:  {corpus.files} files, {len(corpus.train) / 1e6:.2f} MB to train on, "
        f"{len(corpus.validation) / 1e6:.2f} MB held out"
    )
    if options.resume:
        job.say(f"from:  {options.resume}")


def _loop(run: Run, out: Path) -> None:
    """Takes the steps that are left; measures, logs and saves on the way."""
    job, options = run.job, run.options
    log = None
    if job.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        log = MetricsLog(out / "metrics.jsonl", resumed_at=run.step)
    before = Validation(run.step, run.validation_loss())
    job.say(f"step {run.step}: validation loss {before.validation_loss:.3f}")
    if log and run.step == 0:
        log.write(before)
    first = run.step + 1
    # None: no bar where the output is not a terminal.
    hidden = None if job.rank == 0 else True
    with tqdm(total=options.steps, initial=run.step, disable=hidden, unit="step") as bar:
        while run.step < options.steps:
            metrics = run.take_step()
            exposed = "n/a"
            if metrics.exposed_percent is not None:
                exposed = f"{metrics.exposed_percent:.0f}%"
            speed = f"{metrics.tokens_per_second:,.0f} tokens/s, exposed communication {exposed}"
            bar.set_postfix_str(f"loss {metrics.loss:.3f}, {speed}")
            bar.update()
            if log:
                log.write(metrics)
            if run.step == first:
                job.say(run.memory_table())
            last = run.step == options.steps
            if last or run.step % options.eval_every == 0:
                after = Validation(run.step, run.validation_loss())
                job.say(
                    f"step {run.step}: training loss {metrics.loss:.3f}, validation loss "
                    f"{after.validation_loss:.3f}, {speed}"
                )
                if log:
                    log.write(after)
            if last or run.step % options.save_every == 0:
                run.save(out / "checkpoints")
    if log:
        log.close()


def _finish(run: Run, out: Path) -> None:
    """Draws the plot and prints a sample."""
    job, options = run.job, run.options
    if job.rank == 0:
        plot_loss(read_metrics(out / "metrics.jsonl"), out / "loss.png")
    job.say(f"wrote {out / 'metrics.jsonl'}, {out / 'loss.png'} and {out / 'checkpoints'}")
    if not options.sample:
        return
    prompt = bytes(run.corpus.validation[:_PROMPT_BYTES].tolist())
    text = generate(
        run.model,
        prompt,
        options.sample,
        context=options.seq,
        device=job.device,
        seed=options.seed,
    )
    job.say(
        f"--- {len(prompt)} bytes of validation text, and what the model makes of them ---\n"
        + prompt.decode(errors="replace")
        + "|"
        + text.decode(errors="replace")
    )

"""One rank of ``zshard train``: the loop, and what it prints and writes."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import zshard

from ..checkpoint.catalogue import RUN_FOLDER
from ..errors import Error, InputError
from ..gpt import GPT, generate
from ..planning import Plan
from ..streams import upload
from ..words import counted
from .data import Corpus, MicroBatch, find_files
from .job import STOPPED, Job, Place, choose_device
from .metrics import (
    MetricsError,
    MetricsLog,
    RankMemory,
    StepMetrics,
    Validation,
    ddp_memory,
    memory_table,
    plot_loss,
    read_metrics,
)
from .options import TrainOptions, changes_on_resume, options_of
from .output import output_folder
from .resume import Origin, Progress, find_origin
from .scalars import Scalars
from .steptrace import StepTrace
from .trainplan import announce, compare, plan_of

_MAX_GRAD_NORM = 1.0
_VALIDATION_BATCHES = 8  # a rank
_PROMPT_BYTES = 64


class TrainError(Error):
    """Training cannot go on."""


class Run:
    """A training run on one rank: model, optimizer, text, and the steps taken so far."""

    def __init__(
        self, job: Job, options: TrainOptions, corpus: Corpus, origin: Origin | None = None
    ) -> None:
        """Build and wrap the model; with ``origin``, take its state and step from there."""
        self.job, self.options, self.corpus = job, options, corpus
        torch.manual_seed(options.seed)
        plain = GPT(options.model_config()).to(job.device)
        self.model: nn.Module = zshard.wrap(
            plain, strategy=options.strategy, precision=options.policy()
        )
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
        self._saving: zshard.SaveHandle | None = None
        if origin is not None:
            zshard.load(origin.path, self.model, self.optimizer)
            self.step = origin.progress.step
        self.resumed_at = self.step

    def take_step(self) -> StepMetrics:
        """One optimizer step over ``accumulate`` micro-batches of every rank."""
        options, stats = self.options, zshard.stats(self.model)
        stats.reset()
        began = time.perf_counter()
        rate = options.learning_rate(self.step)
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
        # The number waits for the device, so that the clock below tells the truth.
        norm = float(zshard.clip_grad_norm_(self.model, _MAX_GRAD_NORM))
        mean = self.job.mean(loss)
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise TrainError(
                f"the loss is {mean} and the gradients' norm {norm} at step {self.step + 1}: start "
                f"again with a lower --lr (it is {options.lr}), or resume from the last checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        seconds = time.perf_counter() - began
        tokens = options.batch * options.seq * options.accumulate * self.job.world_size
        return StepMetrics(
            step=self.step,
            loss=mean,
            grad_norm=norm,
            learning_rate=rate,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            exposed_percent=None
            if self.job.device.type == "cuda"
            else 100 * stats.exposed_seconds / seconds,
        )

    def loss(self, batch: MicroBatch) -> Tensor:
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
        held = RankMemory(
            weights=peak["parameters"] + peak["master"],
            gradients=peak["gradients"],
            optimizer=peak["optimizer"],
            buffers=peak["full_buffers"] + peak["reduce_buffers"],
        )
        ranks = cast("list[RankMemory]", self.job.gather(held))
        low = self.options.precision == "bf16"
        return memory_table(ranks, ddp_memory(self.parameters, low_precision=low))

    def checkpoint(self, out: Path) -> Path:
        """Where the state after the last step is saved."""
        return out / RUN_FOLDER / f"step-{self.step:08d}"

    def save(self, out: Path, *, asynchronous: bool) -> None:
        """Write a checkpoint, after one that is still being written; every rank calls this.

        Raises:
            CheckpointError: for this one, or the one before; names the path.
        """
        progress = Progress(
            self.step, self.job.world_size, self.corpus.checksum, self.options.as_json()
        )
        self._saving = zshard.save(
            self.checkpoint(out),
            self.model,
            self.optimizer,
            extra=progress.as_extra(),
            keep=self.options.keep,
            asynchronous=asynchronous,
        )

    def finish_save(self) -> None:
        """Wait for a checkpoint that is still being written."""
        if self._saving is not None:
            self._saving.wait()


def train(options: TrainOptions, place: Place) -> int:
    """Trains, on the rank that ``place`` says; returns when the run is complete, or has stopped.

    Returns:
        0, or STOPPED if SIGTERM stopped the run; then all that it did is saved.

    Raises:
        InputError: for text or a checkpoint that cannot be used.
        CheckpointError: when one cannot be read or written.
        MetricsError: on rank 0, when the metrics cannot be written.
        TrainError: when the loss is no longer finite.
    """
    origin = None if options.resume is None else find_origin(Path(options.resume))
    corpus = Corpus.read(find_files(options.data), options.seq)
    job = Job(place, choose_device(options.device))
    _require_one_text(job, corpus)
    if origin is not None and origin.progress.text_crc32 != corpus.checksum:
        raise InputError(
            f"the text is not the one that {origin.path} was trained on (CRC-32 "
            f"{corpus.checksum:08x}, not {origin.progress.text_crc32:08x}): give the same --data"
        )
    options = replace(options, ranks=job.world_size)
    out = output_folder(job, options.out)
    planned = None
    if options.plan and job.rank == 0:
        planned = plan_of(options, job.world_size, job.device.type)
        job.say(announce(planned, options))
    run = Run(job, options, corpus, origin)
    _announce(run, origin)
    with job.stopped_by_sigterm():
        try:
            complete = _loop(run, out)
        except (TrainError, MetricsError):
            run.finish_save()  # the others write on, and it may be the one to resume from
            raise
        if complete:
            _finish(run, out, planned)
        else:
            job.say(
                f"stopped by SIGTERM; step {run.step} is saved in {run.checkpoint(out)}\n"
                f"go on with: zshard train --resume {shlex.quote(str(out))}"
            )
        job.leave()
    return 0 if complete else STOPPED


def _require_one_text(job: Job, corpus: Corpus) -> None:
    """Have every rank train on the same text: hosts may have another Python's source files, say."""
    texts = job.gather(corpus.checksum)
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if others:
        raise InputError(
            f"ranks {others} read another text than rank 0 (CRC-32 {texts[others[0]]:08x}, not "
            f"{texts[0]:08x}): give --data, the same on every host, that nothing writes to"
        )


def _announce(run: Run, origin: Origin | None) -> None:
    job, options, corpus = run.job, run.options, run.corpus
    config = options.model_config()
    depth, heads = counted(config.layers, "layer"), counted(config.heads, "head")
    threads = counted(torch.get_num_threads(), "thread")
    job.say(
        f"model: GPT of {run.parameters / 1e6:.2f}M parameters ({depth}, width "
        f"{config.width}, {heads}), {options.strategy}, {options.precision}\n"
        f"ranks: {job.world_size} on {job.device.type}, {threads} each\n"
        f"text:  {counted(corpus.files, 'file')}, {len(corpus.train) / 1e6:.2f} MB to train on, "
        f"{len(corpus.validation) / 1e6:.2f} MB held out"
    )
    if origin is None:
        return
    job.say(f"from:  {origin.path}, step {run.step}")
    for path, why in origin.passed_over.items():
        job.say(f"       not from {path}, which is not whole: {why}")
    if changes := changes_on_resume(options_of(origin), options):
        job.say(f"       changed: {changes}")


def _loop(run: Run, out: Path) -> bool:
    """Take the steps that are left; measure, log and save on the way.

    Returns:
        Whether all were taken; otherwise SIGTERM stopped the run.
    """
    job, options = run.job, run.options
    log = None
    if job.rank == 0:
        scalars = Scalars.open(out, resumed_at=run.step)
        log = MetricsLog(out / "metrics.jsonl", resumed_at=run.step, scalars=scalars)
    before = Validation(run.step, run.validation_loss())
    job.say(f"step {run.step}: validation loss {before.validation_loss:.3f}")
    # A run that was stopped at this step has left it out.
    if log and run.step % options.eval_every == 0 and run.step not in log.validated:
        log.write(before)
    first = run.step + 1
    # None: no bar where the output is not a terminal.
    hidden = None if job.rank == 0 else True
    folder = str(out / "trace") if options.trace == "" else options.trace
    with (
        tqdm(total=options.steps, initial=run.step, disable=hidden, unit="step") as bar,
        StepTrace(job, run.model, folder) as traced,
    ):
        while run.step < options.steps and not job.stopping:
            traced.before_step()
            metrics = run.take_step()
            bar.set_postfix_str(f"loss {metrics.loss:.3f}, {metrics.speed}")
            bar.update()
            if log:
                log.write(metrics)
            if run.step == first:
                job.say(run.memory_table())
            last = run.step == options.steps
            if last or (run.step % options.eval_every == 0 and not job.stopping):
                after = Validation(run.step, run.validation_loss())
                job.say(
                    f"step {run.step}: training loss {metrics.loss:.3f}, validation loss "
                    f"{after.validation_loss:.3f}, {metrics.speed}"
                )
                if log:
                    log.write(after)
            if run.step % options.save_every == 0 and not last and not job.stopping:
                # Beside the next steps, which need the processor and the network more than a disk.
                run.save(out, asynchronous=True)
    # There is no next step, and the process may end only when this is whole.
    run.save(out, asynchronous=False)
    if log:
        log.close()
    traced.require_written()
    return run.step == options.steps


def _finish(run: Run, out: Path, planned: Plan | None) -> None:
    """Draw the plot and print a sample; hold the plan, if there is one, against the run."""
    job, options = run.job, run.options
    if job.rank == 0:
        metrics = read_metrics(out / "metrics.jsonl")
        plot_loss(metrics, out / "loss.png")
        if planned is not None:
            # A resumed run may have had other ranks, or another strategy, before.
            steps = [e for e in metrics if isinstance(e, StepMetrics) and e.step > run.resumed_at]
            job.say(compare(planned, options, run.model, steps))
    job.say(f"wrote {out / 'metrics.jsonl'}, {out / 'loss.png'} and {out / RUN_FOLDER}")
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

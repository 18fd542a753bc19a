"""Trains the decoder twice, in bf16 and in float8, from the same weights on the same batches.

Both runs keep float32 parameters and compute under ``torch.autocast`` in bfloat16, the common recipe
for mixed precision; they differ in the backend given to ``torch.compile`` and in nothing else. On several
ranks :mod:`~f8fx.demo.distributed` shards both, and the gathers differ as well. On a CPU PyTorch emulates
float8: there the demo is about numerics, and which run takes longer depends on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from f8fx.demo import data
from f8fx.demo.cpu import float8_gemms
from f8fx.demo.distributed import Gathered, Ranks, launched, local_device
from f8fx.demo.model import Decoder
from f8fx.demo.plan import Plan, device_note, pick_device, plan_for, ranks_note
from f8fx.hardware import of_device

#: Modules left in bf16: the output projection, as in TorchTitan's Llama configurations.
KEPT = ("output",)


@dataclass(frozen=True)
class Run:
    """What one training run measured.

    Attributes:
        name: ``"bf16"`` or ``"float8"``.
        losses: one per step, in nats per byte.
        step_ms: wall time of each step; the first ones hold the compilation.
        tokens_per_step: tokens in one batch, of all ranks.
        peak_bytes: most CUDA memory allocated at once, ``None`` on CPU.
        converted, total: matmuls in float8, and all of them, over forward and backward; on several ranks, of
            the graph that the blocks share.
        reasons: why the others were skipped -> how many.
        gathered_bytes: what a rank received in all-gathers in a step, ``None`` on one rank.
    """

    name: str
    losses: tuple[float, ...]
    step_ms: tuple[float, ...]
    tokens_per_step: int
    peak_bytes: int | None = None
    converted: int = 0
    total: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    gathered_bytes: int | None = None

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps: a single batch says little."""
        last = max(1, len(self.losses) // 10)
        return statistics.fmean(self.losses[-last:])

    @property
    def median_ms(self) -> float:
        """Median step time, the first fifth (at most 10 steps) left out as warm-up."""
        warm_up = min(10, math.ceil(len(self.step_ms) / 5))
        return statistics.median(self.step_ms[warm_up:] or self.step_ms)

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on per second, at the median step time."""
        return 1000 * self.tokens_per_step / self.median_ms

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        return {
            "name": self.name,
            "final_loss": self.final_loss,
            "median_ms": self.median_ms,
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_bytes,
            "gathered_bytes": self.gathered_bytes,
            "matmuls": {"converted": self.converted, "total": self.total, "skipped": self.reasons},
            "losses": list(self.losses),
            "step_ms": list(self.step_ms),
        }


Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
OnStep = Callable[[int, float, float], None]


def train(
    name: str,
    compiled: Callable[[Decoder], Callable[..., torch.Tensor]],
    plan: Plan,
    batches: Batches,
    on_step: OnStep = lambda step, loss, ms: None,
    ranks: Ranks | None = None,
) -> Run:
    """Trains ``compiled(Decoder(plan.config))`` on ``batches`` with AdamW.

    Args:
        name: the run's name.
        compiled: turns the model into what is called each step.
        plan: sizes, seed and learning rate.
        batches: inputs and targets, each [batch, seq] int64.
        on_step: called after each step with its number, loss and milliseconds.
        ranks: those that train it together; `compiled` has sharded it.
    """
    cuda = plan.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(plan.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        model = Decoder(plan.config).to(plan.device)
    step_model = compiled(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, plan.steps, plan.warm_up)
    )
    losses, times = [], []
    gathered = Gathered()
    for step, (inputs, targets) in enumerate(batches):
        start = time.perf_counter()
        gathered.bytes = 0
        with gathered.counting() if ranks else nullcontext():
            # sharded, the weights are gathered in bfloat16 already
            with torch.autocast(plan.device.type, torch.bfloat16, enabled=ranks is None):
                logits = step_model(inputs.to(plan.device))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(plan.device).flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize(plan.device)
        losses.append(ranks.mean(loss) if ranks else loss.item())
        times.append(1000 * (time.perf_counter() - start))
        on_step(step, losses[-1], times[-1])
    peak = torch.cuda.max_memory_allocated(plan.device) if cuda else None
    received = gathered.bytes if ranks else None
    return Run(name, tuple(losses), tuple(times), plan.tokens_per_step, peak, gathered_bytes=received)


def learning_rate_factor(step: int, steps: int, warm_up: float = 0.1) -> float:
    """Factor of the learning rate: linear warm-up over a share of the steps, then cosine to a tenth."""
    first = max(1, int(steps * warm_up))
    if step < first:
        return (step + 1) / first
    progress = (step - first) / max(1, steps - first)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def compare(
    plan: Plan, corpus: data.Corpus, progress: Progress, ranks: Ranks | None = None
) -> tuple[Run, Run]:
    """The bf16 run and the float8 run, one after the other, with live progress."""
    from f8fx.backend import f8fx as f8fx_backend
    from f8fx.report import recording

    # of its own on each rank; a generator takes no larger one
    seed = plan.seed if ranks is None else (plan.seed * ranks.size + ranks.rank) % (1 << 63)

    def run(name: str, backend: Any, task: TaskID, options: dict[str, Any] | None = None) -> Run:
        torch.compiler.reset()
        gc.collect()
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
        progress.reset(task, status="compiling")

        def tell(step: int, loss: float, ms: float) -> None:
            status = f"loss {loss:.4f}  {ms:7.1f} ms/step"
            progress.update(task, completed=step + 1, status=status)
            if not progress.console.is_terminal and (step + 1) % max(1, plan.steps // 10) == 0:
                progress.console.print(
                    f"{name:<7} step {step + 1} of {plan.steps}  {status}", highlight=False
                )

        def compiled(model: Decoder) -> Callable[..., torch.Tensor]:
            if ranks is not None:
                return ranks.shard(model, plan, backend, options)
            return torch.compile(model, backend=backend, options=options)

        return train(
            name,
            compiled,
            plan,
            corpus.batches(plan.steps, plan.batch, plan.seq, seed),
            tell,
            ranks,
        )

    tasks = [progress.add_task(name, start=False, total=plan.steps, status="") for name in ("bf16", "float8")]
    bf16 = run("bf16", "inductor" if plan.executor == "inductor" else "aot_eager", tasks[0])
    options = {
        "recipe": plan.recipe,
        "select": plan.select,
        "filter_fqns": list(KEPT),
        "executor": plan.executor,
    }
    with recording() as reports, float8_gemms(plan.device):
        float8 = run("float8", f8fx_backend, tasks[1], options=options)
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(report.reasons)
    return bf16, dataclasses.replace(
        float8,
        converted=sum(report.converted for report in reports),
        total=sum(report.total for report in reports),
        reasons=dict(reasons),
    )


def main(args: argparse.Namespace) -> int:
    """Runs the demo with the arguments of ``f8fx demo``; 0 if both runs ended with finite losses.

    Raises:
        ValueError: for options that fit neither each other nor the machine.
        FileNotFoundError: if this Python has no sources to train on.
    """
    device = pick_device(args.device)
    if not launched():
        return _main(args, device, None)
    device = local_device(args, device)
    with Ranks.joined(device) as ranks:
        return _main(args, device, ranks)


def _main(args: argparse.Namespace, device: torch.device, ranks: Ranks | None) -> int:
    from f8fx.demo import show

    hardware = of_device(device)
    plan = plan_for(args, device, ranks.size if ranks else 1)
    speaks = ranks is None or ranks.rank == 0
    # With --json only the JSON goes to stdout; the rest is for people and goes to stderr.
    console = Console(file=sys.stderr if args.json else sys.stdout, quiet=not speaks)
    corpus = data.load()
    show.introduce(plan, corpus, device_note(device, hardware) + ranks_note(plan, args.executor), console)
    columns = (
        TextColumn("{task.description:<7}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bf16, float8 = compare(plan, corpus, progress, ranks)
    if speaks:
        results = show.results(plan, corpus, bf16, float8)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").write_text(show.json_text(results) + "\n")
        show.picture(plan, bf16, float8, args.out / "losses.png")
        if args.json:
            print(show.json_text(results))
        else:
            show.table(bf16, float8, console)
    written = f"Picture and numbers: {args.out / 'losses.png'}, {args.out / 'results.json'}"
    console.print(written, markup=False)
    if not all(math.isfinite(loss) for loss in (*bf16.losses, *float8.losses)):
        console.print("[red]A loss is not finite: this run failed.[/red]")
        return 1
    can_convert = device.type == "cpu" or hardware.float8_tensor_cores
    if plan.select == "all" and can_convert and not float8.converted:
        console.print('[red]select="all" converted nothing: this run failed.[/red]')
        return 1
    return 0

"""A training run: the demo's decoder at about 1 B parameters, on real text, in bf16 and in float8.

``python -m benchmarks.train_1b``. bf16, f8fx (tensorwise, rowwise) and torchao (tensorwise) start from the same weights and see the same batches;
one more bf16 run starts from other weights. The question is whether float8 is further from bf16 than another seed is.
Parameters are float32, computation is bfloat16 by autocast, the output projection stays in it, the text is the
standard library's sources (:mod:`f8fx.demo.data`).

2,000 steps of 8192 tokens take minutes for each run, so runs are made one after the other, each kept when it has ended.
``--checkpoints FOLDER`` also keeps the state of a run that the budget cuts off (13 GB at 1 B), and the next command goes on from
there. A result says how many steps each run has made; gaps are over the steps that both runs have, and a gap in multiples of the spread
of seeds is that of the steps that all three have.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from f8fx.backend import f8fx
from f8fx.demo import data
from f8fx.demo.model import Decoder, DecoderConfig, Rotation, rotation
from f8fx.demo.train import KEPT, learning_rate_factor
from f8fx.report import recording

from . import common
from .common import Grid, Row, console, show

NAME = "train_1b"
STEPS, QUICK_STEPS = 2000, 120
REFERENCE, OTHER_SEED = "bf16", "bf16, other seed"
#: Seconds that are kept for writing a checkpoint.
_CHECKPOINT_S = 40.0
#: Seconds below which no run is begun: a compile, and some steps.
_START_S = 20.0
#: Losses are compared as means over so many steps: a single batch says little.
_WINDOW_SHARE = 40


@dataclass(frozen=True)
class Contender:
    """What a run is: who makes it float8, by which recipe, and the seed of its weights."""

    by: str
    recipe: str | None = None
    seed: int = 0


#: In the order in which they run: the first three answer the question, the last ones compare.
CONTENDERS = {
    REFERENCE: Contender("bf16"),
    "f8fx tensorwise": Contender("f8fx", "tensorwise"),
    OTHER_SEED: Contender("bf16", seed=1),
    "f8fx rowwise": Contender("f8fx", "rowwise"),
    "torchao tensorwise": Contender("torchao", "tensorwise"),
}


@dataclass(frozen=True)
class Setting:
    """What all runs have in common.

    Attributes:
        schedule: the steps that the learning rate's schedule is for. Shorter runs are the beginning of a full one: a warm-up
            in a tenth of 120 steps is so steep that the loss rises for some steps, and what becomes of it then is chance.
    """

    model: str
    steps: int
    schedule: int
    batch: int
    seq: int
    learning_rate: float
    device: str

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


FULL = Setting("1b", STEPS, STEPS, 4, 2048, 3e-4, "cuda")
_SMOKE = Setting("tiny", 4, 4, 2, 32, 3e-3, "cpu")


class Training:
    """One run, which can be stopped after any step and gone on with.

    Args:
        same: what the code and machine are (:data:`benchmarks.common.SAME`) that a file must be of to be gone on from.

    Attributes:
        losses, step_ms: of the steps made so far.
    """

    def __init__(self, contender: Contender, setting: Setting, same: Mapping[str, Any]) -> None:
        self.contender, self.setting = contender, setting
        self.origin = {"same": dict(same), "contender": asdict(contender), "setting": asdict(setting)}
        cuda = setting.device == "cuda"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(contender.seed)
            self.model = Decoder(DecoderConfig.named(setting.model)).to(setting.device)
        config = self.model.config
        # as in Llama's own code; computed in the model, Inductor does it for every element of every layer
        self.rotation = rotation(
            setting.seq, config.head_dim, config.rope_theta, torch.device(setting.device)
        )
        self.step_model = self._compiled(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, setting.schedule)
        )
        self.losses: list[float] = []
        self.step_ms: list[float] = []

    def _compiled(self, model: nn.Module) -> Callable[[Tensor, Rotation], Tensor]:
        smoke = self.setting.device == "cpu"
        backend: Any = "aot_eager" if smoke else "inductor"
        options: dict[str, Any] | None = None
        if self.contender.by == "f8fx":
            backend = f8fx
            options = {"recipe": self.contender.recipe, "filter_fqns": list(KEPT), "strict": True}
            options["select"] = "all"
            if smoke:
                options["executor"] = "eager"
        elif self.contender.by == "torchao":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            assert self.contender.recipe is not None
            config = Float8LinearConfig.from_recipe_name(self.contender.recipe)  # type: ignore[arg-type]
            convert_to_float8_training(
                model, config=config, module_filter_fn=lambda module, name: name not in KEPT
            )
        return torch.compile(model, backend=backend, options=options)  # type: ignore[return-value]

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One step, waited for."""
        device = self.setting.device
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = self.step_model(inputs.to(device), self.rotation)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())  # waits
        if device == "cuda":
            torch.cuda.synchronize()
        self.step_ms.append(1e3 * (time.perf_counter() - start))

    def save(self, path: Path) -> None:
        """Everything that the next step depends on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            **self.origin,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "losses": self.losses,
            "step_ms": self.step_ms,
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> bool:
        """Goes on from a file, if it is there and of the same code, contender and setting."""
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.setting.device, weights_only=True)
        if any(state.get(key) != value for key, value in self.origin.items()):
            console.print(f"{path.name} is of other code or another setting: not gone on from")
            return False
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.losses, self.step_ms = state["losses"], state["step_ms"]
        return True


def run(
    name: str,
    setting: Setting,
    corpus: data.Corpus,
    budget: common.Budget,
    checkpoints: Path | None,
    stamp: Mapping[str, Any],
) -> Row:
    """Makes one run, or goes on with it where the stamp is that of its beginning, until it ends or the budget does."""
    cuda = setting.device == "cuda"
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    training = Training(CONTENDERS[name], setting, {key: stamp[key] for key in common.SAME})
    path = checkpoints / f"{common.slug(name)}.pt" if checkpoints else None
    if path and training.load(path):
        console.print(f"{name}: goes on after step {len(training.losses)}")
    reserve = _CHECKPOINT_S if path and cuda else 2.0
    batches = corpus.batches(setting.steps, setting.batch, setting.seq, seed=0)
    # an interrupt (Ctrl-C) ends the run like a budget that is used up
    with recording() as reports, contextlib.suppress(KeyboardInterrupt):
        for inputs, targets in itertools.islice(batches, len(training.losses), None):
            if budget.left < reserve:
                break
            training.step(inputs, targets)
            made = len(training.losses)
            if made % max(1, setting.steps // 10) == 0:
                loss, ms = training.losses[-1], training.step_ms[-1]
                console.print(f"{name}: step {made}, loss {loss:.4f}, {ms:.0f} ms")
    del training.losses[len(training.step_ms) :]  # of a step that was interrupted
    finished = len(training.losses) == setting.steps
    if path and finished:
        path.unlink(missing_ok=True)
    elif path and training.losses:
        training.save(path)
    return {
        "run": name,
        "finished": finished,
        "steps": len(training.losses),
        "losses": training.losses,
        "tokens_per_second": tokens_per_second(training.step_ms, setting.tokens),
        "step_ms": [round(ms, 3) for ms in training.step_ms],
        "peak": torch.cuda.max_memory_allocated() if cuda else None,
        "converted": [sum(r.converted for r in reports), sum(r.total for r in reports)],
        "clocks": common.clocks(),
    }


def tokens_per_second(step_ms: Sequence[float], tokens: int) -> float | None:
    """At the median step, without the first tenth (at least 3), which compile and warm up."""
    rest = step_ms[max(3, len(step_ms) // 10) :]
    return 1e3 * tokens / statistics.median(rest) if rest else None


# -- what came out --------------------------------------------------------------------------------


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Means over the last ``window`` steps, from the first step on that has so many before it."""
    total, result = 0.0, []
    for index, loss in enumerate(losses):
        total += loss - (losses[index - window] if index >= window else 0.0)
        if index >= window - 1:
            result.append(total / window)
    return result


def gap(left: Sequence[float], right: Sequence[float]) -> float | None:
    """The largest difference of two loss curves, smoothed, after the first tenth of the steps they share.

    ``None`` where there is none, as of a curve that is not finite.
    """
    steps = min(len(left), len(right))
    window = max(1, steps // _WINDOW_SHARE)
    differences = [
        abs(a - b) for a, b in zip(smooth(left[:steps], window), smooth(right[:steps], window), strict=True)
    ]
    compared = differences[steps // 10 :]
    return max(compared) if compared and all(map(math.isfinite, compared)) else None


def gap_over_spread(
    losses: Sequence[float], reference: Sequence[float], other_seed: Sequence[float]
) -> float | None:
    """A run's gap to bf16 in multiples of that between two seeds of bf16, over the steps that all three have.

    Runs differ more the further they are, so that gaps over different numbers of steps do not compare.
    """
    steps = min(map(len, (losses, reference, other_seed)))
    found, spread = (gap(reference[:steps], other[:steps]) for other in (losses, other_seed))
    return found / spread if found is not None and spread else None


def latest(rows: Sequence[Row]) -> dict[str, Row]:
    """The furthest row of each run, in the order of :data:`CONTENDERS`."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["run"] not in best or row["steps"] >= best[row["run"]]["steps"]:
            best[row["run"]] = row
    return {name: best[name] for name in CONTENDERS if name in best}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Each run's largest gap to bf16, and in multiples of what another seed makes; speed over bf16."""
    runs = latest(rows)
    reference = runs.get(REFERENCE)
    if reference is None:
        return {"gap_to_bf16": {}, "spread_of_seeds": None, "gap_over_spread": {}, "speedup": {}}
    gaps = {name: gap(reference["losses"], row["losses"]) for name, row in runs.items() if name != REFERENCE}
    spread = gaps.pop(OTHER_SEED, None)
    ratios = {}
    if spread is not None:
        seeds = (reference["losses"], runs[OTHER_SEED]["losses"])
        ratios = {name: gap_over_spread(runs[name]["losses"], *seeds) for name in gaps}
    found = {
        "steps": {name: row["steps"] for name, row in runs.items()},
        "diverged": [name for name, row in runs.items() if not all(map(math.isfinite, row["losses"]))],
        "gap_to_bf16": gaps,
        "spread_of_seeds": spread,
        "gap_over_spread": {name: ratio for name, ratio in ratios.items() if ratio is not None},
        "speedup": {
            name: row["tokens_per_second"] / reference["tokens_per_second"]
            for name, row in runs.items()
            if row["tokens_per_second"] and reference["tokens_per_second"]
        },
    }
    return {**found, "finite": not found["diverged"]}


def grids(result: dict[str, Any]) -> list[Grid]:
    """One line for each run."""
    found = summary(result["rows"])
    cells = []
    for name, row in latest(result["rows"]).items():
        last = row["losses"][-max(1, len(row["losses"]) // 20) :]
        cells.append(
            (
                name,
                f"{row['steps']} of {result['settings']['steps']}",
                show(statistics.fmean(last) if last else None, ".4f"),
                "diverged"
                if name in found.get("diverged", ())
                else show(
                    found["spread_of_seeds"] if name == OTHER_SEED else found["gap_to_bf16"].get(name), ".4f"
                ),
                show(found["gap_over_spread"].get(name)),
                show(row["tokens_per_second"], ",.0f"),
                show(found["speedup"].get(name)),
                show(row["peak"] / 2**30 if row["peak"] else None, ".1f"),
                "{} of {}".format(*row["converted"]) if row["converted"][1] else "-",
            )
        )
    headers = (
        *("", "steps", "last loss", "largest gap to bf16", "gap / spread of seeds"),
        *("tokens/s", "over bf16", "peak GiB", "matmuls in float8"),
    )
    return [Grid("Training: loss in nats a byte, gaps of smoothed losses", headers, tuple(cells))]


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, smoke=True)
    parser.add_argument("--steps", type=int, help=f"of each run ({STEPS}; with --quick {QUICK_STEPS})")
    parser.add_argument("--checkpoints", type=Path, help="folder for the state of a run that is cut off")
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="runs to make"
    )
    args = parser.parse_args(argv)
    if args.cpu_smoke:
        return smoke(args.only)
    if reason := common.why_no_gpu():
        console.print(reason)
        return 0
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    setting = Setting(**{**asdict(FULL), "steps": steps, "schedule": max(steps, STEPS)})
    device = torch.device("cuda", torch.cuda.current_device())
    stamp = common.stamp(device)
    settings = {**asdict(setting), "python": stamp["python"]}  # whose sources are the text
    recorder = common.Recorder(NAME, stamp, settings, args.results, args.fresh)
    budget = common.Budget(args.budget_s)
    corpus = data.load()
    for name in args.only:
        if recorder.has(run=name, finished=True):
            console.print(f"{name}: on record already.")
        elif budget.left > (_CHECKPOINT_S if args.checkpoints else _START_S):
            try:
                recorder.add(run(name, setting, corpus, budget, args.checkpoints, stamp))
            except Exception:  # torchao is not there, say: the others can run
                recorder.failed = True
                console.print(f"FAILED: {name}\n{traceback.format_exc()}", markup=False)
    recorder.rows = list(latest(recorder.rows).values())
    complete = all(recorder.has(run=name, finished=True) for name in CONTENDERS)
    if not complete:
        console.print("Not all runs have made all steps; run again to go on.")
    result, path = recorder.finish(summary(recorder.rows), complete)
    for grid in grids(result):
        grid.print()
    console.print(f"Written to {path}")
    return int(recorder.failed or not result["summary"].get("finite", True))


def smoke(only: Sequence[str]) -> int:
    """A few steps of a tiny decoder on CPU, without code generation; nothing is kept."""
    torch.set_num_threads(1)
    corpus = data.load(max_bytes=1 << 16)
    stamp = common.stamp(torch.device("cpu"))
    rows = [run(name, _SMOKE, corpus, common.Budget(None), None, stamp) for name in only]
    console.print(common.SMOKE)
    for grid in grids({"rows": rows, "settings": asdict(_SMOKE)}):
        grid.print()
    return 0 if summary(rows).get("finite", True) and all(row["finished"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

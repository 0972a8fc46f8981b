"""Train tiny-dsa: dense 2,048 -> dense 8,192 -> sparse 8,192 -> sparse 32,768.

    python training/train.py --data training/build/train.u8.xz --state training/build/state \\
        --out kvpolicy/models/tiny_dsa

A run cut by --max-seconds (or killed) goes on from --state with the same command: the schedule,
the windows and the taught rows are functions of the step number.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import layers
import torch
from data import Stream, teaching_rows
from export import export, load_params
from model import Forward, Params, Pass, TinyConfig, init_params
from optim import Optimizer
from rich.console import Console
from rich.progress import Progress, TextColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = TinyConfig()
SEED = 1
TOKENS = 65_536
# Real steps before a stage's CUDA graph is captured: they compile and fill the caches.
EAGER_STEPS = 3
# Two files a kind keep every state file under 15 MiB.
SPLIT = ("gate", "up")


@dataclass(frozen=True)
class Stage:
    """One part of the schedule; every step has TOKENS tokens."""

    name: str
    length: int
    dense: bool
    rows: int
    steps: int

    @property
    def batch(self) -> int:
        """Sequences a step."""
        return TOKENS // self.length


def stages(steps: list[int]) -> list[Stage]:
    """The four stages with their step counts; rows are those of one sequence that teach."""
    return [
        Stage("dense-2048", 2_048, True, 24, steps[0]),
        Stage("dense-8192", 8_192, True, 96, steps[1]),
        Stage("sparse-8192", 8_192, False, 256, steps[2]),
        Stage("sparse-32768", 32_768, False, 1_024, steps[3]),
    ]


class Trainer:
    """Parameters, optimiser and the static buffers of the captured step."""

    def __init__(self, stream: Stream, total: int, device: torch.device) -> None:
        """Fresh parameters; the learning rates fall as if `total` steps were run."""
        self.stream, self.total = stream, total
        self.params: Params = init_params(CONFIG, SEED, device)
        for param in self.params.values():
            param.requires_grad_()
        self.optimizer = Optimizer(self.params)
        self.ids = torch.zeros(TOKENS, dtype=torch.int64, device=device)
        self.target = torch.zeros_like(self.ids)
        # Sums over the steps since the last log line: cross entropy and four KLs.
        self.metrics = torch.zeros(5, device=device)

    def prepare(self, stage: Stage) -> Callable[[], None]:
        """The stage's step function over the static buffers."""
        self.rows = torch.zeros(stage.batch, stage.rows, dtype=torch.int64, device=self.ids.device)
        run = Pass(stage.length, stage.dense)

        def step() -> None:
            result = Forward(self.params, CONFIG, run, self.rows)(self.ids)
            loss = layers.head_loss(
                result.hidden, self.params["norm"], self.params["head"], self.target
            )
            total = loss + sum(result.kl)
            grads = torch.autograd.grad(total, list(self.params.values()))
            self.optimizer.update(dict(zip(self.params, grads, strict=True)))
            self.metrics += torch.stack([loss.detach(), *(kl.detach() for kl in result.kl)])

        return step

    def load_batch(self, stage: Stage, step: int) -> None:
        """Fill the static buffers for a global step."""
        offsets = self.stream.offsets(SEED, step, stage.batch, stage.length)
        ids, target = self.stream.windows(offsets, stage.length)
        self.ids.copy_(ids)
        self.target.copy_(target)
        rows = teaching_rows(SEED, step, stage.batch, stage.rows, stage.length)
        self.rows.copy_(torch.from_numpy(rows))
        self.optimizer.set_step(step, self.total)


def save_state(trainer: Trainer, step: int, folder: Path) -> None:
    """Write the state beside `folder`, then swap: a kill leaves the old or the new one."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    kinds: dict[str, dict[str, Tensor]] = {"params": trainer.params, **trainer.optimizer.tensors()}
    for kind, tensors in kinds.items():
        for part in (0, 1):
            chosen = {n: t.detach().cpu() for n, t in tensors.items() if (n in SPLIT) == bool(part)}
            if chosen:
                save_file(chosen, new / f"{kind}-{part}.safetensors")
    (new / "step.json").write_text(json.dumps({"step": step, "total": trainer.total}))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(new, folder)


def load_state(trainer: Trainer, folder: Path) -> int:
    """Restore a state; return its step, 0 where there is none."""
    if not (folder / "step.json").exists():
        return 0
    record = json.loads((folder / "step.json").read_text())
    if record["total"] != trainer.total:
        raise ValueError(
            f"{folder} has a horizon of {record['total']} steps: run with it or delete the folder"
        )
    kinds = {"params": trainer.params, **trainer.optimizer.tensors()}
    with torch.no_grad():
        for kind, tensors in kinds.items():
            for file in folder.glob(f"{kind}-*.safetensors"):
                for name, value in load_file(file).items():
                    tensors[name].copy_(value)
    return int(record["step"])


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph: launched eagerly it is bound by the CPU at 2,048 tokens."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Run:
    """Bookkeeping of one invocation: limits, log, progress."""

    def __init__(
        self, args: argparse.Namespace, trainer: Trainer, progress: Progress, total: int
    ) -> None:
        """Start the clock."""
        self.args, self.trainer, self.progress = args, trainer, progress
        self.begin = self.saved = self.logged_at = time.monotonic()
        self.logged_step = 0
        self.task = progress.add_task("train", total=total, note="")
        args.log.parent.mkdir(parents=True, exist_ok=True)

    def out_of_time(self) -> bool:
        """True once --max-seconds have passed."""
        return bool(time.monotonic() - self.begin > self.args.max_seconds)

    def log(self, stage: Stage, step: int) -> None:
        """Write one JSON line of means since the last and advance the bar."""
        values = (self.trainer.metrics / (step - self.logged_step)).tolist()
        self.trainer.metrics.zero_()
        now = time.monotonic()
        rate = TOKENS * (step - self.logged_step) / (now - self.logged_at)
        line = {
            "step": step, "stage": stage.name, "bpb": round(values[0] / 0.693147, 4),
            "kl": [round(v, 4) for v in values[1:]], "tokens_per_s": round(rate),
            "seconds": round(now - self.begin, 1),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        }  # fmt: skip
        with self.args.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        note = f"{stage.name} bpb {line['bpb']:.3f} {rate / 1e6:.2f} Mtok/s kl {line['kl']}"
        self.progress.update(self.task, completed=step, note=note)
        if not self.progress.console.is_terminal and step % 200 == 0:
            self.progress.console.print(f"{step} {note} {line['seconds']} s", highlight=False)
        self.logged_at, self.logged_step = now, step
        if values[0] != values[0]:
            raise FloatingPointError(f"the loss is not a number at step {step}")

    def stage(self, stage: Stage, first: int, start: int) -> int:
        """Run a stage's steps from `start`; return the step reached."""
        step_fn, end = self.trainer.prepare(stage), first + stage.steps
        self.logged_step, self.logged_at = start, time.monotonic()
        for step in range(start, end):
            if step == start + EAGER_STEPS:
                step_fn = capture(step_fn)
            self.trainer.load_batch(stage, step)
            step_fn()
            if (step + 1) % self.args.log_every == 0 or step + 1 == end:
                self.log(stage, step + 1)
                if time.monotonic() - self.saved > self.args.save_seconds:
                    save_state(self.trainer, step + 1, self.args.state)
                    self.saved = time.monotonic()
                if self.out_of_time():
                    return step + 1
        return end


def train(args: argparse.Namespace) -> bool:
    """Train up to the time limit; True once all steps are done."""
    device = torch.device("cuda")
    plan = stages([int(n) for n in args.steps.split(",")])
    trainer = Trainer(Stream(args.data, device), args.horizon, device)
    total = sum(s.steps for s in plan)
    layers.compile_all()
    step = load_state(trainer, args.state)
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(width=160)) as progress:
        run, first = Run(args, trainer, progress, total), 0
        for stage in plan:
            if first <= step < first + stage.steps and not run.out_of_time():
                step = run.stage(stage, first, step)
            first += stage.steps
    save_state(trainer, step, args.state)
    return step == total


def main() -> None:
    """Parse the command line, train, and export when done."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--steps", default="5000,1500,4160,1200", help="steps of the four stages")
    parser.add_argument(
        "--horizon", type=int, default=16_700, help="steps over which the learning rates would fall"
    )
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument("--log-every", type=int, default=20)
    args = parser.parse_args()
    args.log = args.log or args.state.with_name("train.jsonl")
    done = train(args)
    export(load_params(args.state), CONFIG, args.out)
    print("done" if done else "stopped at the time limit; run the same command again")


if __name__ == "__main__":
    main()

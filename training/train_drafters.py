"""Train the drafters of tiny-dsa: DFlash, DFlash2 and DSpark, on the same batches, side by side.

    python training/train_drafters.py --data training/build/train.u8.xz \\
        --state training/build/drafters --out kvpolicy/models

The target runs once a step, with the sparse attention it is served with; its tapped layers and its laws
feed every drafter. A run that was cut goes on from --state with the same command. Learning rates follow
the step number, or the clock where --max-seconds comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import draft_losses
import draft_model
import layers
import torch
from data import Stream
from draft_model import Grid, Params, hidden_states, init_params, tiny_config
from draft_optim import DraftOptimizer
from export import from_checkpoint
from model import Forward, Pass, TinyConfig
from rich.console import Console
from rich.progress import Progress, TextColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpolicy.speculative.drafters.config import DrafterConfig

TARGET = TinyConfig()
METHODS = ("dflash", "dflash2", "dspark")
SEED = 1
EAGER_STEPS = 3
# The share of total variation in DSpark's loss rises between these parts of the run.
SHARE, SHARE_FROM, SHARE_TO = 0.8, 0.3, 0.6


class Learner:
    """One drafter in training."""

    def __init__(self, method: str, device: torch.device) -> None:
        """Fresh parameters."""
        self.cfg: DrafterConfig = tiny_config(method)
        self.params: Params = init_params(self.cfg, SEED, device)
        for param in self.params.values():
            param.requires_grad_()
        self.optimizer = DraftOptimizer(self.params)
        # Sums since the last log line: loss, top-1, overlap.
        self.metrics = torch.zeros(3, device=device)

    def learn(self, batch: Batch, share: Tensor) -> None:
        """One step on a batch."""
        loss, stats = self.loss(batch, share)
        grads = torch.autograd.grad(loss, list(self.params.values()))
        self.optimizer.update(dict(zip(self.params, grads, strict=True)))
        self.metrics += torch.cat([loss.detach()[None], stats])

    def loss(self, batch: Batch, share: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, statistics [2])."""
        cast = {n: p.to(batch.taps.dtype) if p.dim() == 2 else p for n, p in self.params.items()}
        h = hidden_states(cast, self.cfg, batch.taps, batch.first, batch.phase, batch.sequences)
        return draft_losses.loss_of(
            cast, self.cfg, h.flatten(0, 1), batch.head, batch.law, batch.tokens, batch.valid, share
        )


class Batch:
    """What the target gives for a step. taps: [N, m d]; first: [anchors, d]; law: fp32 [anchors, K, V];
    tokens: [anchors, K + 1]; valid: [anchors, K]."""

    def __init__(
        self, params: Params, run: Pass, ids: Tensor, phase: Tensor, cfg: DrafterConfig
    ) -> None:
        """Run the target over ids [N]."""
        with torch.no_grad():
            result = Forward(params, TARGET, run, None)(ids)
            logits = layers.head_logits(result.hidden, params["norm"], params["head"].to(run.dtype))
            law = torch.softmax(logits, -1)
            self.taps = torch.cat([t.to(run.dtype) for t in result.taps], 1)
            self.head = params["head"].to(run.dtype)
            self.phase, self.sequences = phase, ids.shape[0] // run.seq_len
            grid = Grid(run.seq_len, cfg.block, cfg.window)
            starts = torch.arange(self.sequences, device=ids.device)[:, None] * run.seq_len
            ahead = torch.arange(cfg.tokens + 1, device=ids.device)
            inside = grid.anchors(phase)[:, None] + ahead
            at = (inside.clamp(max=run.seq_len - 1) + starts[..., None]).flatten(0, 1)
            self.tokens = ids[at]
            self.first = params["embed"][self.tokens[:, 0]]
            self.law = law[at[:, :-1]]
            self.valid = (inside[:, 1:] < run.seq_len).repeat(self.sequences, 1)


class Trainer:
    """The target, the learners and the static buffers of a step."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        """Load the target and the text."""
        self.args, self.device = args, device
        self.stream = Stream(args.data, device)
        self.target: Params = {
            n: p.to(device) for n, p in from_checkpoint(args.target, TARGET).items()
        }
        self.learners = [Learner(m, device) for m in args.methods]
        gpu = device.type == "cuda"
        self.run = Pass(
            args.length, dense=False, triton=gpu,
            dtype=torch.bfloat16 if gpu else torch.float32, taps=self.learners[0].cfg.taps,
        )  # fmt: skip
        self.ids = torch.zeros(args.batch * args.length, dtype=torch.int64, device=device)
        self.phase = torch.zeros((), dtype=torch.int64, device=device)
        self.share = torch.zeros((), device=device)

    def step(self) -> None:
        """One step of every learner over the static buffers."""
        wide = next((x.cfg for x in self.learners if not x.cfg.shift), self.learners[0].cfg)
        batch = Batch(self.target, self.run, self.ids, self.phase, wide)
        for learner in self.learners:
            learner.learn(batch, self.share)

    def load_batch(self, step: int, u: float) -> None:
        """Fill the static buffers for a step, at the fraction u of the run."""
        offsets = self.stream.offsets(SEED + 100, step, self.args.batch, self.args.length)
        self.ids.copy_(self.stream.windows(offsets, self.args.length)[0])
        self.phase.fill_(step % draft_model.STRIDE)
        rising = (u - SHARE_FROM) / (SHARE_TO - SHARE_FROM)
        self.share.fill_(SHARE * min(max(rising, 0.0), 1.0))
        for learner in self.learners:
            learner.optimizer.set_step(step, u)


def save_state(trainer: Trainer, step: int, clock: Clock, folder: Path) -> None:
    """Write the state beside `folder`, then swap: a kill leaves the old or the new one."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for learner in trainer.learners:
        kinds = {"params": learner.params, **learner.optimizer.tensors()}
        flat = {f"{k}/{n}": t.detach().cpu() for k, d in kinds.items() for n, t in d.items()}
        save_file(flat, new / f"{learner.cfg.method}.safetensors")
    (new / "step.json").write_text(
        json.dumps({"step": step, "seconds": clock.spent, "origin": clock.origin})
    )
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(new, folder)


def load_state(trainer: Trainer, folder: Path) -> tuple[int, float, float]:
    """Restore a state; return its step, seconds and origin of the clock, zeros where there is none."""
    if not (folder / "step.json").exists():
        return 0, 0.0, 0.0
    with torch.no_grad():
        for learner in trainer.learners:
            kinds = {"params": learner.params, **learner.optimizer.tensors()}
            for name, value in load_file(folder / f"{learner.cfg.method}.safetensors").items():
                kind, _, own = name.partition("/")
                kinds[kind][own].copy_(value)
    record = json.loads((folder / "step.json").read_text())
    return int(record["step"]), float(record["seconds"]), float(record["origin"])


def export(trainer: Trainer, out: Path) -> None:
    """Write every drafter as a folder tiny_dsa_METHOD, weights in bf16."""
    for learner in trainer.learners:
        folder = out / f"tiny_dsa_{learner.cfg.method}"
        folder.mkdir(parents=True, exist_ok=True)
        weights = {n: p.detach().to(torch.bfloat16).cpu() for n, p in learner.params.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(learner.cfg.to_json(), indent=2) + "\n")


def prepared(trainer: Trainer, graph: bool) -> Callable[[], None]:
    """The step, as a CUDA graph where asked for: launched one by one its kernels are bound by the CPU."""
    if not graph:
        return trainer.step
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        trainer.step()
    return captured.replay


class Clock:
    """How far the run is. seconds: spent in earlier invocations; origin: when steps ran at full speed."""

    def __init__(self, args: argparse.Namespace, seconds: float, origin: float) -> None:
        """Start."""
        self.args, self.before, self.origin = args, seconds, origin
        self.begin = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds of all invocations."""
        return self.before + time.monotonic() - self.begin

    def fraction(self, step: int) -> float:
        """Of the run that is done: by steps or by time, whichever is more."""
        by_time = (self.spent - self.origin) / (self.args.max_seconds - self.origin)
        return max(step / self.args.steps, by_time)


def log(trainer: Trainer, step: int, since: int, clock: Clock, path: Path, seconds: float) -> str:
    """Write one JSON line of means since the last; return a note for the bar."""
    line: dict[str, object] = {
        "step": step, "seconds": round(clock.spent, 1), "share": round(trainer.share.item(), 3),
        "ms_per_step": round(1000 * seconds / (step - since), 1),
    }  # fmt: skip
    note = []
    for learner in trainer.learners:
        loss, top1, overlap = (learner.metrics / (step - since)).tolist()
        learner.metrics.zero_()
        if loss != loss:
            raise FloatingPointError(f"{learner.cfg.method}: the loss is no number at step {step}")
        line[learner.cfg.method] = [round(loss, 4), round(top1, 4), round(overlap, 4)]
        note.append(f"{learner.cfg.method} {top1:.3f}/{overlap:.3f}")
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return f"{line['ms_per_step']} ms " + " ".join(note)


def train(args: argparse.Namespace) -> None:
    """Train to the last step or second."""
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(args, device)
    if args.compile:
        layers.compile_all()
        draft_model.compile_all()
        draft_losses.compile_all()
    step, seconds, origin = load_state(trainer, args.state)
    clock, run = Clock(args, seconds, origin), trainer.step
    args.log.parent.mkdir(parents=True, exist_ok=True)
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    first = since = step
    saved = logged = time.monotonic()
    with Progress(*columns, console=Console(width=170)) as progress:
        task = progress.add_task("train", total=1.0, note="")
        while (u := clock.fraction(step)) < 1.0:
            if step == first + EAGER_STEPS:
                run = prepared(trainer, args.graph)
                if first == 0:  # compilation is no part of the schedule
                    clock.origin = clock.spent
            trainer.load_batch(step, u)
            run()
            step += 1
            if step - since >= args.log_every:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                now = time.monotonic()
                note = log(trainer, step, since, clock, args.log, now - logged)
                since, logged = step, now
                progress.update(task, completed=u, note=note)
                if not progress.console.is_terminal:
                    progress.console.print(f"{step} {clock.spent:.0f} s {note}", highlight=False)
                if now - saved > args.save_seconds:
                    save_state(trainer, step, clock, args.state)
                    export(trainer, args.out)
                    saved = time.monotonic()
    save_state(trainer, step, clock, args.state)
    export(trainer, args.out)
    print(f"{step} steps in {clock.spent:.0f} s")


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=here.parent / "kvpolicy/models/tiny_dsa")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where the folders tiny_dsa_* go")
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.log = args.log or args.state.with_name("drafters.jsonl")
    train(args)


if __name__ == "__main__":
    main()

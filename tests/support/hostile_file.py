"""The source of a file of controllers that do what no controller should, and of some that behave."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = '''
"""Says where it runs, and does what no controller should."""
import os, signal, sys, time
from kvpolicy import CacheRule, Plan

def tame(observation):
    return Plan.even(observation.requests[0].budget)

def spins(observation):
    while True:
        pass

def holds(observation):  # C code that never lets go of the interpreter's lock
    return sum(range(10**13))

def sleeps(observation):
    time.sleep(10)

def stops(observation):
    os.kill(os.getpid(), signal.SIGSTOP)

def exits(observation):
    os._exit(3)

def killed(observation):
    os.kill(os.getpid(), signal.SIGKILL)

def raises(observation):
    raise ValueError("no\\nidea")

def leaves(observation):
    raise SystemExit(4)

def interrupts(observation):
    raise KeyboardInterrupt

def numberless(observation):
    return Plan.even(float("nan"))

def planless(observation):
    return 3

def chatters(observation):
    print("[1, 2]" * 1000, flush=True)
    return Plan.even(7)

def garbles(observation):  # all that it finds open
    for number in range(3, 512):
        try:
            os.write(number, b"\\x00\\x00\\x00\\x02{}" * 1000)
        except OSError:
            pass
    return Plan.even(7)

def boasts(observation):  # a length beyond all bounds
    for number in range(3, 512):
        try:
            os.write(number, b"\\xff" * 64)
        except OSError:
            pass
    time.sleep(10)

def hangs_up(observation):
    os.closerange(3, 512)
    time.sleep(10)

def crowds(observation):
    return Plan(targets={number: 1.0 for number in range(60_000)})

def bystander(observation):
    return Plan(targets={r.request_id: os.getpid() for r in observation.requests})

class Counts:
    cache_rule = CacheRule(eviction="lru", admit_newest=False, seed="first")
    wants_curves = True

    def __init__(self, rows=9):
        self.rows, self.calls = rows, 0

    def initial(self, stores):
        return [self.rows] * len(stores)

    def decide(self, observation):
        self.calls += 1
        return Plan.even(self.calls)
'''


def ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Whether none is left, not even as a zombie."""
    return all(p.returncode is not None and not Path(f"/proc/{p.pid}").exists() for p in processes)

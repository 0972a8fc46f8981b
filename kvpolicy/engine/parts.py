"""What an engine is made of, from its config: device, model, control loop, memory."""

from __future__ import annotations

import logging

import torch

from kvpolicy.config import EngineConfig
from kvpolicy.engine.loop import ControlLoop
from kvpolicy.engine.speculation import Speculator
from kvpolicy.errors import UserError, reason
from kvpolicy.kernels.memory_ops import memory_ops
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.rule import CacheRule
from kvpolicy.models.loader import DecodeModel, Dummy, load_model
from kvpolicy.speculative.acceptance import Rule, choose_on_device, choose_on_host
from kvpolicy.speculative.registry import make as make_drafter

MIB = 1 << 20
# Staging beyond what plain decoding needs takes at most this part of the device memory, by default.
STAGING_PART = 4
log = logging.getLogger(__name__)


def pick_device(name: str) -> torch.device:
    """The device of a config; ``auto`` is a GPU where there is one. UserError if there is no such."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda': no CUDA device is available here; use cpu or auto")
    return torch.device(name)


def load(config: EngineConfig, device: torch.device) -> DecodeModel:
    """The model that a config names. UserError for one that cannot be had."""
    dummy = None
    if config.dummy_weights:
        dummy = Dummy(config.layers, config.vocab, config.selection)
    for name in () if dummy else ("layers", "vocab", "selection"):
        value = getattr(config, name)
        if value != EngineConfig.model_fields[name].default:
            raise UserError(f"{name} = {value}: goes with dummy_weights")
    return load_model(config.model, device, config.backend, config.dtype, dummy)


def make_control(config: EngineConfig, layout: Layout) -> ControlLoop:
    """The control loop of a config; where steps are the clock decisions have no deadline."""
    return ControlLoop(
        config.controller,
        config.control_interval,
        layout,
        config.eviction,
        deadline=0.0 if config.clock == "steps" else config.decision_deadline_ms / 1e3,
        decision_log=config.decision_log,
        isolate=config.controller_isolation == "auto",
        admission=config.admission,
    )


def make_memory(
    config: EngineConfig,
    layout: Layout,
    rule: CacheRule,
    backend: str,
    device: torch.device,
    draft_tokens: int = 0,
) -> Hierarchy:
    """The hierarchy in the sizes of a config, with in-flight rows for ``draft_tokens`` verified tokens of
    each request. CapacityError if its fixed part alone does not fit."""
    device_bytes = int(config.device_kv_mib * MIB)
    plain = config.max_concurrency * layout.topk
    # With a drafter a step wants several times that; what does not fit is served in waves.
    widest = max(store.record.bytes for store in layout.stores)
    more = min(plain * (1 + draft_tokens), device_bytes // STAGING_PART // widest)
    return Hierarchy(
        layout,
        device_bytes=device_bytes,
        host_bytes=int(config.host_kv_mib * MIB),
        reserve=Reserve(
            config.staging_rows or max(plain, more),
            config.max_concurrency * (1 + draft_tokens) + config.prefill_chunk,
            config.max_concurrency,
        ),
        floor_rows=config.floor_rows,
        rule=rule,
        device=device,
        poison=config.validate_,
        ops=memory_ops(backend),
    )


def make_speculator(
    config: EngineConfig, model: DecodeModel, device: torch.device
) -> Speculator | None:
    """The speculation of a config, None without a drafter. UserError for a drafter that cannot be had."""
    drafter = make_drafter(config.drafter, model, config.num_draft_tokens)
    if drafter is None:
        return None
    on_device = device.type == "cuda" and model.backend == "triton"
    choose = choose_on_device if on_device else choose_on_host
    rule = Rule(config.verification)
    return Speculator(drafter, model, rule, config.num_draft_tokens, choose)


def finish(device: torch.device) -> None:
    """Wait for all kernels: they read and write the pinned host pool in place, which nobody else tracks."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:  # a device that has failed computes nothing any more
        log.warning("closing: %s", reason(error))

"""The formula: weights, KV bytes per token, and how many sequences of a length fit at once. Pure.

    KV bytes per token = layers × kv_heads × 2 × head_dim × bytes of the dtype     (a latent: layers × width × bytes)
    KV bytes on a GPU  = memory × utilisation − weights − working memory;  on a CPU: HEADRACE_ENGINE__KV_CACHE_GIB
    tokens             = whole blocks × block
    sequences at once  = KV bytes ÷ bytes of one sequence, in whole blocks; layers with a window keep no more than it

Memory and results are of one GPU; with tensor parallel each holds its share of weights and heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.capacity.shape import Attention, Shape, size_of
from service.capacity.weights import Weights

GIB = 1 << 30
# Tokens per KV block where nothing else is set.
GPU_BLOCK, CPU_BLOCK = 16, 128
# What the driver, kernels and CUDA graphs hold beside PyTorch's own memory.
RUNTIME_BYTES = GIB // 2
# Live copies of the logits of one step while it samples, 4 bytes each.
LOGITS = 3


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engine is given; exactly one of the two memories."""

    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    block: int
    tensor_parallel: int = 1
    kv_bytes: int | None = None
    gpu_bytes: int | None = None
    utilization: float = 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits, on one GPU."""

    weights: int  # bytes
    working: int  # bytes; 0 where the KV cache is given
    kv_bytes: int
    per_token: int  # KV bytes of a token in all layers, windows left out
    block: int
    kv_tokens: int
    context: int
    slots: int
    full: float  # sequences of the whole context that fit at once

    @property
    def fits(self) -> bool:
        return self.full >= 1.0


def plan(shape: Shape, weights: Weights, machine: Machine) -> Plan:
    own = weights.bytes(machine.dtype) // machine.tensor_parallel
    working = 0
    kv = machine.kv_bytes
    if kv is None:
        working = working_bytes(shape, machine)
        kv = int((machine.gpu_bytes or 0) * machine.utilization) - own - working
    kv = max(0, kv)
    full = at_once(shape, machine, kv, machine.max_model_len)
    return Plan(
        weights=own,
        working=working,
        kv_bytes=kv,
        per_token=token_bytes(shape, machine),
        block=machine.block,
        kv_tokens=int(full * machine.max_model_len) if math.isfinite(full) else 0,
        context=machine.max_model_len,
        slots=machine.max_num_seqs,
        full=full,
    )


def token_bytes(shape: Shape, machine: Machine) -> int:
    size = size_of(machine.dtype)
    return sum(group.numbers(machine.tensor_parallel) for group in shape.attention) * size


def at_once(shape: Shape, machine: Machine, kv_bytes: int, tokens: int) -> float:
    """Sequences of `tokens` that fit into the KV cache together; infinite for a model that keeps nothing per token."""
    size = size_of(machine.dtype) * machine.block
    # Memory comes in blocks that hold the same tokens of all layers; part of one is no use.
    per_block = sum(group.numbers(machine.tensor_parallel) for group in shape.attention) * size
    if not per_block:
        return math.inf
    usable = kv_bytes // per_block * per_block
    one = sum(
        blocks(group, tokens, machine) * group.numbers(machine.tensor_parallel) * size for group in shape.attention
    )
    return usable / one


def blocks(group: Attention, tokens: int, machine: Machine) -> int:
    """Blocks that one sequence holds of these layers. A window drops what it has passed, a step's tokens later."""
    whole = -(-tokens // machine.block)
    if group.window is None:
        return whole
    kept = min(group.window - 1 + machine.max_num_batched_tokens, tokens)
    return min(whole, -(-kept // machine.block) + 1)


def working_bytes(shape: Shape, machine: Machine) -> int:
    """An estimate of the largest step's activations and logits: 0.5 B and 7 B on an H200 took 1.1 and 1.6 GiB."""
    size = size_of(machine.dtype)
    step = (
        machine.max_num_batched_tokens * (4 * shape.hidden + 3 * shape.intermediate // machine.tensor_parallel) * size
    )
    logits = LOGITS * 4 * machine.max_num_seqs * shape.vocabulary
    return step + logits + RUNTIME_BYTES

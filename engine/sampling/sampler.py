"""From logits to one token a row, on the device, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.params import SamplingParams
from engine.sampling.random import gumbel_noise, stream_key


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Settings of a step's sampled rows, on the device.

    Attributes:
        rows: [n] int64, which rows of the logits.
        temperature, top_p: [n] float32.
        top_k: [n] int64, vocabulary size = off.
        keys: [n] int64 noise keys.
        filters: whether any row uses top-k or top-p.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor
    filters: bool

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], indices: Sequence[int], vocab_size: int, device: torch.device
    ) -> RandomRows | None:
        """The rows that sample, None if all are greedy.

        Args:
            params: settings of every row.
            indices: how many tokens each row's request has generated before this one.
        """
        rows = [i for i, p in enumerate(params) if not p.greedy]
        if not rows:
            return None
        chosen = [params[i] for i in rows]
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in chosen]
        keys = [stream_key(params[i].seed, indices[i]) for i in rows]
        floats = torch.tensor([[p.temperature for p in chosen], [p.top_p for p in chosen]], dtype=torch.float32)
        ints = torch.tensor([rows, top_k, keys], dtype=torch.int64)
        if device.type == "cuda":
            floats, ints = floats.pin_memory(), ints.pin_memory()
        floats, ints = floats.to(device, non_blocking=True), ints.to(device, non_blocking=True)
        filters = any(p.top_p < 1 for p in chosen) or any(k < vocab_size for k in top_k)
        return cls(ints[0], floats[0], floats[1], ints[1], ints[2], filters)


def filter_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, then top-p, leaves out. At least one token of a row always stays.

    Args:
        logits: [rows, vocabulary] float32.
        top_k: [rows] int64, vocabulary size = off.
        top_p: [rows] float32, 1 = off.
    """
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    values = values.masked_fill(rank >= top_k[:, None], float("-inf"))
    probabilities = values.softmax(dim=-1)
    # Keep a token if what comes before it has not yet reached p: the one that crosses p stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    values = values.masked_fill((before >= top_p[:, None]) & (rank > 0), float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, values)


def sample(
    logits: torch.Tensor, random: RandomRows | None, return_logprobs: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choose a token for each row: argmax for greedy rows, Gumbel-max for the others.

    Args:
        logits: [rows, vocabulary], any floating dtype.
        random: settings of the rows that sample, None if all are greedy.
        return_logprobs: also give the log-softmax of the processed logits at the chosen token.

    Returns:
        tokens [rows] int64 and logprobs [rows] float32 or None.
    """
    tokens = logits.argmax(dim=-1)
    processed = logits.float() if return_logprobs else None
    if random is not None:
        scaled = logits[random.rows].float() / random.temperature[:, None]
        if random.filters:
            scaled = filter_top_k_top_p(scaled, random.top_k, random.top_p)
        noisy = scaled + gumbel_noise(random.keys, logits.shape[-1])
        tokens = tokens.index_copy(0, random.rows, noisy.argmax(dim=-1))
        if processed is not None:
            processed = processed.index_copy(0, random.rows, scaled)
    if processed is None:
        return tokens, None
    return tokens, processed.log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)

"""From logits to one token a row, on the device, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.sampling.filters import RandomRows, warp
from engine.sampling.logprobs import Choice, choice_with_logprobs
from engine.sampling.processors import add_bias, process_history
from engine.sampling.random import gumbel_noise
from engine.sampling.settings import SettingsGatherer, StepSettings

if TYPE_CHECKING:
    from engine.requests import Request


class Sampler:
    """Chooses the tokens of steps. Rows that are plain greedy cost an argmax and nothing else.

    Args:
        device: of the logits.
        return_logprobs: give the log probability of each chosen token.
    """

    def __init__(self, device: torch.device, return_logprobs: bool = False) -> None:
        self._gatherer = SettingsGatherer(device)
        self._return_logprobs = return_logprobs

    def choose(
        self, logits: torch.Tensor, requests: Sequence[Request], ends: Sequence[int], last_token: torch.Tensor
    ) -> Choice:
        """One token a row.

        Args:
            logits: [rows, vocabulary], any floating dtype; left as they are.
            requests: whose rows they are.
            ends: tokens of each request before the one to be chosen, prompt included.
            last_token: [slots] int32; by slot, the token chosen last, which may not have reached the host.
        """
        settings = self._gatherer.gather(requests, ends, logits.shape[-1], last_token)
        return choose(logits, settings, self._return_logprobs)


def choose(logits: torch.Tensor, settings: StepSettings | None, return_logprobs: bool = False) -> Choice:
    """`Sampler.choose` with the settings gathered; None = every row is plain greedy."""
    if settings is None:
        tokens = logits.argmax(dim=-1)
        return choice_with_logprobs(tokens, logits.float(), None, ()) if return_logprobs else Choice(tokens)
    where = settings.processed
    if settings.num_processed == 0:
        tokens, processed = logits.argmax(dim=-1), logits.float()
    elif where is None:
        tokens, processed = _process(logits.float(), settings)
    else:
        chosen, changed = _process(logits[where].float(), settings)
        tokens = logits.argmax(dim=-1).index_copy(0, where, chosen)
        processed = logits.float().index_copy(0, where, changed) if return_logprobs else logits
    if not return_logprobs:
        return Choice(tokens)
    if settings.raw is not None:
        processed = processed.index_copy(0, settings.raw, logits[settings.raw].float())
    return choice_with_logprobs(tokens, processed, settings.top, settings.top_counts)


def _process(logits: torch.Tensor, settings: StepSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the processed rows, and their logits as they were when the tokens were chosen."""
    if settings.bias is not None:
        logits = add_bias(logits, settings.bias, settings.history)
    if settings.history is not None and settings.history.changes_logits:
        logits = process_history(logits, settings.history)
    random = settings.random
    if random is None:
        return logits.argmax(dim=-1), logits
    if random.num_rows == len(logits):
        logits = warp(logits, random)
        return _draw(logits, random), logits
    warped = warp(logits[random.rows], random)
    tokens = logits.argmax(dim=-1).index_copy(0, random.rows, _draw(warped, random))
    return tokens, logits.index_copy(0, random.rows, warped)


def _draw(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Gumbel-max: the argmax of log probabilities with noise is a sample of the distribution."""
    return (logits + gumbel_noise(random.keys, logits.shape[-1])).argmax(dim=-1)

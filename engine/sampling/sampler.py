"""From logits to one token a row, on the device, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels import Cuts
from engine.sampling.filters import FilterGroup, RandomRows, warp
from engine.sampling.logprobs import Choice, choice_with_logprobs
from engine.sampling.operators import Operators
from engine.sampling.processors import add_bias, process_history
from engine.sampling.settings import SettingsGatherer, StepSettings
from engine.sampling.slots import SampledRequest


class Sampler:
    """Chooses the tokens of steps. Rows that are plain greedy cost an argmax and nothing else.

    Args:
        device: of the logits.
        return_logprobs: give the log probability of each chosen token.
    """

    def __init__(self, device: torch.device, return_logprobs: bool = False) -> None:
        self._op = Operators.choose(device)
        self._gatherer = SettingsGatherer(device)
        self._return_logprobs = return_logprobs

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Choose once in every way from logits like those to come, so that no request waits for a kernel to compile."""
        one, ids = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        out, last = torch.zeros_like(ids), torch.zeros_like(ids)  # written to: not the rows and slots that are read
        random = RandomRows(ids, one, one * 0.5, one * 0, ids + 1, ids, 1, (FilterGroup(None, 1),), True)
        for kind in {dtype, torch.float32}:  # changed logits are float32
            logits = torch.zeros(1, vocab_size, dtype=kind, device=device)
            self._op.greedy_argmax(logits, slots=ids, last_token=last)
            for cuts in (None, self._op.filter_cuts(logits, random, ids)):
                self._op.gumbel_argmax(logits, one, ids, cuts, ids, out, ids, last)

    def greedy(self, logits: torch.Tensor, slots: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
        """`choose` for rows that are all plain greedy, without log probabilities: [rows] int64. May be captured."""
        return self._op.greedy_argmax(logits, slots=slots, last_token=last_token)

    def choose(
        self,
        logits: torch.Tensor,
        requests: Sequence[SampledRequest],
        ends: Sequence[int] | np.ndarray,
        slots: torch.Tensor,
        last_token: torch.Tensor,
        greedy: torch.Tensor | None = None,
    ) -> Choice:
        """One token a row.

        Args:
            logits: [rows, vocabulary], any floating dtype; left as they are.
            requests: whose rows they are.
            ends: tokens of each request before the one to be chosen, prompt included.
            slots: [rows] int64, the requests' slots.
            last_token: [slots] int64; by slot, the token chosen last, which may not have reached the host. The chosen
                tokens are written to it.
            greedy: what `greedy` has given for these logits; None = it has not been called.
        """
        settings = self._gatherer.gather(requests, ends, logits.shape[-1], last_token)
        if settings is None:
            tokens = self.greedy(logits, slots, last_token) if greedy is None else greedy
            return choice_with_logprobs(tokens, logits.float(), None, ()) if self._return_logprobs else Choice(tokens)
        if settings.changes_logits:
            tokens, processed = self._choose_changed(logits, settings)
            last_token.index_copy_(0, slots, tokens)
        else:
            tokens, processed = self._choose_unchanged(logits, settings, slots, last_token)
        if processed is None:
            return Choice(tokens)
        if settings.raw is not None:
            processed = processed.index_copy(0, settings.raw, logits[settings.raw].float())
        return choice_with_logprobs(tokens, processed, settings.top, settings.top_counts)

    def _choose_changed(self, logits: torch.Tensor, settings: StepSettings) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens of all rows, and the logits they were chosen from, None unless log probabilities are wanted. Copies
        of the processed rows are changed."""
        where, random = settings.processed, settings.random
        own = _change(logits if where is None else logits[where], settings)
        rows = None if random is None else _some(random, len(own))
        tokens, cuts = self._draw(own, random, rows)
        processed = self._warped(own, random, rows, cuts)
        if where is not None:
            tokens = self._op.greedy_argmax(logits).index_copy(0, where, tokens)
            processed = None if processed is None else logits.float().index_copy(0, where, processed)
        return tokens, processed

    def _choose_unchanged(
        self, logits: torch.Tensor, settings: StepSettings, slots: torch.Tensor, last_token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`_choose_changed` where no bias and no rule concerns any row; sets the last tokens as well."""
        where, random = settings.processed, settings.random
        rows = None
        if random is not None:
            rows = _some(random, len(logits))
            if rows is not None and where is not None:
                rows = where[rows]
        tokens, cuts = self._draw(logits, random, rows, slots, last_token)
        return tokens, self._warped(logits, random, rows, cuts)

    def _draw(
        self,
        logits: torch.Tensor,
        random: RandomRows | None,
        rows: torch.Tensor | None,
        slots: torch.Tensor | None = None,
        last_token: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Cuts | None]:
        """A sample of ``rows`` (None = all), the argmax of the others; and where the filters cut."""
        if random is None:
            return self._op.greedy_argmax(logits, slots=slots, last_token=last_token), None
        greedy = None if rows is None else self._op.greedy_argmax(logits, slots=slots, last_token=last_token)
        cuts = self._op.filter_cuts(logits, random, rows) if random.filtered else None
        tokens = self._op.gumbel_argmax(logits, random.temperature, random.keys, cuts, rows, greedy, slots, last_token)
        return tokens, cuts

    def _warped(
        self, logits: torch.Tensor, random: RandomRows | None, rows: torch.Tensor | None, cuts: Cuts | None
    ) -> torch.Tensor | None:
        """Float32 logits with temperature and filters applied to ``rows``; None unless log probabilities are wanted."""
        if not self._return_logprobs:
            return None
        if random is None:
            return logits.float()
        if rows is None:
            return warp(logits, random.temperature, cuts)
        return logits.float().index_copy(0, rows, warp(logits[rows], random.temperature, cuts))


def _some(random: RandomRows, num_rows: int) -> torch.Tensor | None:
    """The rows that sample, None if they are all."""
    return None if random.num_rows == num_rows else random.rows


def _change(logits: torch.Tensor, settings: StepSettings) -> torch.Tensor:
    """Float32 logits of the processed rows with bias, penalties and rules applied."""
    logits = logits.float()
    if settings.bias is not None:
        logits = add_bias(logits, settings.bias, settings.history)
    if settings.history is not None and settings.history.changes_logits:
        logits = process_history(logits, settings.history)
    return logits

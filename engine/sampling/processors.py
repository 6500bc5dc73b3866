"""Changes to logits that come before temperature: bias, penalties, forbidden continuations.

Order and meaning are those of transformers' ``generate`` (`transformers.generation.logits_process`, 5.24): bias,
repetition penalty, then what sets logits to -inf. Presence and frequency penalty, which transformers lacks, follow the
OpenAI API reference and come after the repetition penalty. All functions return new tensors, take [rows, vocabulary]
float32 logits and pad ids of histories with the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.sampling.params import MIN_TEMPERATURE

LARGEST_LOGIT = torch.finfo(torch.float32).max / 2 * MIN_TEMPERATURE
"""A penalty on top of a bias may reach infinity, whose probabilities are NaN; this does not, over any temperature."""

WAIT_FOR_MATCHES = 64
"""After so many tokens of an n-gram it is worth waiting for the device to hear whether any place still matches: sizes
that anybody uses never come to it, and a huge one must not be walked through for nothing."""


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """The rows that look back, and their settings.

    Attributes:
        rows: [m] int64 rows of the logits.
        tokens: [m, longest] int64 tokens so far, padded at the end.
        lengths: [m] int64 how many of them count.
        generated_from: [m] int64 index of the first generated token in ``tokens``.
        repetition, presence, frequency: [m] float32; 1, 0, 0 = off.
        ngram: [m] int64 size of n-grams that must not repeat, 0 = off.
        penalizes_all, penalizes_generated: whether any row has a repetition, or a presence or frequency penalty.
        largest_ngram: of all rows, 0 if none has the rule.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    generated_from: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    ngram: torch.Tensor
    penalizes_all: bool
    penalizes_generated: bool
    largest_ngram: int

    @property
    def changes_logits(self) -> bool:
        """Whether any row has a penalty or the n-gram rule; others look back for their bias only."""
        return self.penalizes_all or self.penalizes_generated or self.largest_ngram > 0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Prefixes that must have just come.

    Attributes:
        owners: [c] int64 row of the `HistoryRows` that must end with the prefix.
        prefixes: [c, longest] int64, the last token first.
        lengths: [c] int64.
    """

    owners: torch.Tensor
    prefixes: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class BiasRows:
    """Numbers to add to single logits.

    Attributes:
        rows, tokens: [b] int64 where.
        values: [b] float32 what.
        conditions: on which the last ``c`` of them depend; None if ``c`` is 0.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor
    conditions: Conditions | None


def add_bias(logits: torch.Tensor, bias: BiasRows, history: HistoryRows | None) -> torch.Tensor:
    """Add every unconditional bias, and the conditional ones whose prefix has just come."""
    values = bias.values
    if bias.conditions is not None:
        assert history is not None, "rows with conditions look back"
        met = met_conditions(history, bias.conditions)
        always = values[: len(values) - len(met)]
        values = torch.cat((always, torch.where(met, values[len(always) :], 0.0)))
    total = torch.zeros_like(logits).index_put_((bias.rows, bias.tokens), values, accumulate=True)
    return logits + total


def met_conditions(history: HistoryRows, conditions: Conditions) -> torch.Tensor:
    """[c] bool: whether each owner's history ends with the prefix."""
    owners = conditions.owners
    back = torch.arange(conditions.prefixes.shape[1], device=owners.device)
    position = history.lengths[owners][:, None] - 1 - back
    recent = history.tokens[owners].gather(1, position.clamp(min=0))
    same = (recent == conditions.prefixes) & (position >= 0)
    return (same | (back >= conditions.lengths[:, None])).all(dim=1)


def process_history(logits: torch.Tensor, history: HistoryRows) -> torch.Tensor:
    """Penalties and the n-gram rule on the rows of ``history``; none exceeds `LARGEST_LOGIT`."""
    own = logits[history.rows]
    if history.penalizes_all:
        own = penalize_repetition(own, history.tokens, history.repetition)
    if history.penalizes_generated:
        own = penalize_occurrence(
            own, history.tokens, history.lengths, history.generated_from, history.presence, history.frequency
        )
    if history.largest_ngram:
        own = forbid_repeated_ngrams(own, history.tokens, history.lengths, history.ngram, history.largest_ngram)
    return logits.index_copy(0, history.rows, own.clamp(max=LARGEST_LOGIT))


def penalize_repetition(logits: torch.Tensor, tokens: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive logits of the tokens in ``tokens`` by the row's penalty, multiply negative ones (CTRL, Keskar et
    al. 2019). A token counts once however often it comes."""
    seen = _spare_column(logits, torch.bool).scatter_(1, tokens, True)[:, :-1]
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)


def penalize_occurrence(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    generated_from: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Subtract ``count * frequency + (count > 0) * presence``, counts over generated tokens only (OpenAI API)."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    generated = (position >= generated_from[:, None]) & (position < lengths[:, None])
    counts = _spare_column(logits, logits.dtype).scatter_add_(1, tokens, generated.to(logits.dtype))[:, :-1]
    return logits - counts * frequency[:, None] - (counts > 0) * presence[:, None]


def forbid_repeated_ngrams(
    logits: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, sizes: torch.Tensor, largest: int
) -> torch.Tensor:
    """Set to -inf every token that would complete an n-gram the row already has; size 0 leaves a row alone."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    # A token is forbidden if it ends a window inside the history whose other tokens are the history's last ones.
    match = (sizes > 0)[:, None] & (position >= (sizes - 1)[:, None]) & (position < lengths[:, None])
    # A history has no n-gram longer than itself, whatever size is asked for.
    for back in range(1, min(largest, tokens.shape[1])):
        if back % WAIT_FOR_MATCHES == 0 and not (match & (sizes > back)[:, None]).any():
            break
        suffix = tokens.gather(1, (lengths - back).clamp(min=0)[:, None])
        match &= (tokens.roll(back, dims=1) == suffix) | (back >= sizes)[:, None]
    spare = logits.shape[-1]
    forbidden = _spare_column(logits, torch.bool).scatter_(1, torch.where(match, tokens, spare), True)[:, :-1]
    return logits.masked_fill(forbidden, float("-inf"))


def _spare_column(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros with one column more than the vocabulary, for the padding."""
    return torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=dtype, device=logits.device)

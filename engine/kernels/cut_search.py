"""Search for a cut among the logits of one row, by one program.

The row is given by its neighbourhoods that may hold the cut, as a list of their numbers. Values are searched by keys,
integers in the order of floats.
"""

from __future__ import annotations

from engine.kernels.language import tl, triton


@triton.jit
def order_key(x):
    """int32 in the order of floats; both zeros have the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float of a key, given as int64."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _tile(logits, chosen, first, count, vocab, TILE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Logits and ids of chosen neighbourhoods, NaN, which compares with nothing, where there are none."""
    member = first + tl.arange(0, TILE)
    group = tl.load(chosen + member, mask=member < count, other=0)
    index = group[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
    live = (member < count)[:, None] & (index < vocab)
    return tl.load(logits + index, mask=live, other=float("nan")).to(tl.float32), index


@triton.jit
def search(
    logits,
    chosen,
    count,
    vocab,
    low,
    high,
    goal,
    peak,
    scale,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Key of the largest value in the row, among those with keys from ``low`` to ``high``, such that the values at or
    above it number (or weigh) ``goal`` or more."""
    while low < high:
        span = high - low
        bottom, top = key_value(low), key_value(high)
        # Weights 40 temperatures down are nothing, and -inf or -1e30 stand for tokens that are forbidden.
        evenly = tl.maximum(bottom, top - 57.7 / scale)
        step = (top - evenly) * 0.2
        first = low + (2 * span + 4) // 5
        second = low + (4 * span + 4) // 5
        third = tl.minimum(tl.maximum(order_key(evenly + step).to(tl.int64), low + 1), high)
        fourth = tl.minimum(tl.maximum(order_key(evenly + 3 * step).to(tl.int64), low + 1), high)
        first_value, second_value = key_value(first), key_value(second)
        third_value, fourth_value = key_value(third), key_value(fourth)
        first_sum = tl.zeros((TILE, NEIGHBOURS), tl.float32)
        second_sum = tl.zeros((TILE, NEIGHBOURS), tl.float32)
        third_sum = tl.zeros((TILE, NEIGHBOURS), tl.float32)
        fourth_sum = tl.zeros((TILE, NEIGHBOURS), tl.float32)
        least = tl.full((TILE, NEIGHBOURS), float("inf"), tl.float32)
        most = tl.full((TILE, NEIGHBOURS), float("-inf"), tl.float32)
        for start in range(0, count, TILE):
            x, _ = _tile(logits, chosen, start, count, vocab, TILE, NEIGHBOURS)
            if WEIGHTED:
                weight = tl.exp2((x - peak) * scale)
            else:
                weight = tl.full((TILE, NEIGHBOURS), 1.0, tl.float32)
            first_sum += tl.where(x >= first_value, weight, 0.0)
            second_sum += tl.where(x >= second_value, weight, 0.0)
            third_sum += tl.where(x >= third_value, weight, 0.0)
            fourth_sum += tl.where(x >= fourth_value, weight, 0.0)
            inside = (x >= bottom) & (x <= top)
            least = tl.where(inside & (x < least), x, least)
            most = tl.where(inside & (x > most), x, most)
        low, high = _narrow(low, high, first, tl.sum(tl.sum(first_sum, 1), 0) >= goal)
        low, high = _narrow(low, high, second, tl.sum(tl.sum(second_sum, 1), 0) >= goal)
        low, high = _narrow(low, high, third, tl.sum(tl.sum(third_sum, 1), 0) >= goal)
        low, high = _narrow(low, high, fourth, tl.sum(tl.sum(fourth_sum, 1), 0) >= goal)
        lowest, highest = tl.min(tl.min(least, 1), 0), tl.max(tl.max(most, 1), 0)
        if lowest <= highest:
            low = tl.maximum(low, order_key(lowest).to(tl.int64))
            high = tl.minimum(high, order_key(highest).to(tl.int64))
    return low


@triton.jit
def _narrow(low, high, key, reached):
    return tl.where(reached, tl.maximum(low, key), low), tl.where(reached, high, tl.minimum(high, key - 1))


@triton.jit
def weigh(logits, chosen, count, vocab, value, peak, scale, TILE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Weight of what lies above a value, and how many equal it."""
    above = tl.zeros((TILE, NEIGHBOURS), tl.float32)
    equal = tl.zeros((TILE, NEIGHBOURS), tl.float32)
    for start in range(0, count, TILE):
        x, _ = _tile(logits, chosen, start, count, vocab, TILE, NEIGHBOURS)
        above += tl.where(x > value, tl.exp2((x - peak) * scale), 0.0)
        equal += tl.where(x == value, 1.0, 0.0)
    return tl.sum(tl.sum(above, 1), 0), tl.sum(tl.sum(equal, 1), 0)


@triton.jit
def place_of(logits, chosen, count, vocab, value, wanted, TILE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Id of the last of the first ``wanted`` tokens that equal a value."""
    met = tl.zeros((), tl.int32)
    place = tl.zeros((), tl.int32)
    for start in range(0, count, TILE):
        x, index = _tile(logits, chosen, start, count, vocab, TILE, NEIGHBOURS)
        equal = (x == value).to(tl.int32)
        each = tl.sum(equal, 1)
        rank = met + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(equal, 1)
        first = (equal != 0) & (rank.to(tl.float32) <= wanted)
        place = tl.maximum(place, tl.max(tl.max(tl.where(first, index, 0), 1), 0))
        met += tl.sum(each, 0)
    return place

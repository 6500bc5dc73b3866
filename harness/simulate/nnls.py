"""Least squares with weights that are never negative."""

from __future__ import annotations

import numpy as np

from harness.metrics.observations import FloatArray


def nonnegative_least_squares(a: FloatArray, b: FloatArray) -> FloatArray:
    """The ``x >= 0`` that minimises ``|a x - b|``: the active-set method of Lawson and Hanson (1974), chapter 23.

    Args:
        a: [observations, columns]; columns of very different size are scaled by the caller.
        b: [observations].
    """
    columns = a.shape[1]
    gram, target = a.T @ a, a.T @ b
    tolerance = 1e-10 * max(1.0, float(np.abs(target).max(initial=0.0)))
    x = np.zeros(columns)
    active = np.zeros(columns, dtype=bool)
    for _ in range(3 * columns + 10):
        gradient = target - gram @ x
        gradient[active] = -np.inf
        if active.all() or gradient.max() <= tolerance:
            break
        active[int(np.argmax(gradient))] = True
        while True:
            at = np.flatnonzero(active)
            solved = np.zeros(columns)
            solved[at] = np.linalg.lstsq(gram[np.ix_(at, at)], target[at], rcond=None)[0]
            negative = at[solved[at] <= 0]
            if not len(negative):
                break
            steps = x[negative] / np.maximum(x[negative] - solved[negative], 1e-300)
            x += steps.min() * (solved - x)
            x[negative[steps <= steps.min()]] = 0.0
            active &= x > 0
        x = solved
    return x

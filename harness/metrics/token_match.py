"""The correctness gate's question: did two runs deliver the same tokens?"""

from __future__ import annotations

import numpy as np
import pandas as pd


def tokens_equal(tokens: pd.DataFrame, run_id: str, reference_run_id: str) -> bool | None:
    """Whether every request of ``run_id`` has the token ids that it has in ``reference_run_id``.

    Args:
        tokens: the ``tokens`` table of both runs.

    Returns:
        None if one of the runs has no tokens or they were not given the same requests: then nothing was compared.
    """
    found: list[dict[str, np.ndarray]] = []
    for wanted in (run_id, reference_run_id):
        rows = tokens[tokens["run_id"] == wanted]
        found.append(dict(zip(rows["request_id"], rows["token_ids"], strict=True)))
    given, reference = found
    if not given or given.keys() != reference.keys():
        return None
    return all(np.array_equal(ids, reference[request_id]) for request_id, ids in given.items())

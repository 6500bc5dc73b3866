"""Settings of engines checked before anything runs.

Only the engines themselves know what their settings may be, and asking them loads torch, which the command line does
without. So one short child process (``python -m harness.check``) judges all jobs of a command at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.apart import NoAnswer, answer, ask
from harness.backends.settings import engine_settings, environment_named
from harness.errors import one_line


def check_engines(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Find engine settings that their engine would refuse whatever the model.

    A command whose every job would fail is refused. In a sweep with good values among bad ones the bad ones are said
    beforehand and fail as rows of their own, beside the others' results.

    Args:
        configs: resolved configs of all jobs. If none sets anything of its engine, no process is started.

    Returns:
        One line for each job that will fail; empty if none will.

    Raises:
        ValueError: the setting, its value and what is allowed; or the check itself did not work.
    """
    asked = [{group: config[group] for group in ("engine", "generation")} for config in configs]
    asked = [job for job in asked if engine_settings(job["engine"]).keys() - {"attn_implementation"}]
    if not asked:
        return []
    by_env: dict[str, list[dict[str, Any]]] = {}
    for job in asked:
        by_env.setdefault(json.dumps(job["engine"].get("env") or {}, sort_keys=True), []).append(job)
    found: list[str] = []
    for env, jobs in by_env.items():  # an engine may be installed where only its own environment finds it
        variables = json.loads(env)
        try:
            found += ask("harness.check", jobs, env=variables)
        except NoAnswer as error:
            under = f" with {environment_named(variables)}" if variables else ""
            raise ValueError(f"the settings of the engine could not be checked{under}: {error}") from error
    if len(found) == len(configs):
        raise ValueError(found[0])
    return found


def errors(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the jobs that have something wrong, a line each. Loads torch.

    Args:
        jobs: for each its groups ``engine`` and ``generation`` as plain values.
    """
    from harness.backends import GenerationSettings, check

    found = []
    for job in jobs:
        try:
            check(job["engine"]["name"], engine_settings(job["engine"]), GenerationSettings(**job["generation"]))
        except (ValueError, TypeError) as error:
            found.append(f"engine {job['engine']['name']}: {one_line(error)}")
    return found


if __name__ == "__main__":
    raise SystemExit(answer(errors))

"""Hands the planned jobs of a sweep to Hydra's launcher, in the planned order.

Hydra's own sweeper runs the product of the swept values in the order in which they were written; blocks need an order
of their own. Everything else of a sweep (launchers, callbacks, ``multirun.yaml``) is Hydra's, as its sweeper does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from harness.manifest import MULTIRUN_FILE


def launch(
    hydra: Hydra,
    config_name: str,
    overrides: Sequence[str],
    jobs: Sequence[Sequence[str]],
    task: Callable[[DictConfig], Any],
) -> None:
    """Run ``task`` once for each of ``jobs`` by the launcher that the config chooses.

    Args:
        overrides: of the command, which choose launcher and folders.
        jobs: complete overrides of each job.
    """
    given = [*overrides, f"hydra.mode={RunMode.MULTIRUN.name}"]  # as Hydra's command line adds it
    config = hydra.compose_config(config_name, given, RunMode.MULTIRUN, with_log_configuration=True)
    callbacks = Callbacks(config)
    callbacks.on_multirun_start(config=config, config_name=config_name)
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
        task_function=task,
        config=config,
    )
    folder = Path(config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / MULTIRUN_FILE)
    size = config.hydra.sweeper.get("max_batch_size") or len(jobs)
    for first in range(0, len(jobs), size):
        for done in launcher.launch(jobs[first : first + size], initial_job_idx=first):
            _ = done.return_value  # raises what the job raised
    callbacks.on_multirun_end(config=config, config_name=config_name)

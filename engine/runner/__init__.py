"""The device side: packed inputs, forward pass, graphs, sampling."""

from engine.runner.host_blocks import Transfer
from engine.runner.launched_step import LaunchedStep
from engine.runner.runner import ModelRunner

__all__ = ["LaunchedStep", "ModelRunner", "Transfer"]

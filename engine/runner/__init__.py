"""The device side: packed inputs, forward pass, graphs, sampling."""

from engine.runner.host_blocks import Transfer
from engine.runner.runner import LaunchedStep, ModelRunner

__all__ = ["LaunchedStep", "ModelRunner", "Transfer"]

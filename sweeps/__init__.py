"""Hydra configuration: ``config.yaml`` and its groups, values only; their schemas are in ``harness.config_schemas``."""

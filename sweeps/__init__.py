"""Hydra configuration: ``config.yaml`` and its groups. Only YAML lives here; the schemas are in ``harness.config``."""

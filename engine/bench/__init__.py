"""Measurements of the engine's parts by themselves."""

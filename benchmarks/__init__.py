"""Measurements: what the README's tables are made from."""

"""Collectives, generated code and peak memory of a setting, without a GPU."""

"""Moved to the lab: says the new name."""

raise SystemExit("error: moved: python -m lab.benchmarks.NAME")

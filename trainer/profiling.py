"""Moved to the lab: says the new name."""

raise SystemExit("error: moved: python -m lab.profiling.NAME for peak, gpu_code and collectives")

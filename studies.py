"""Moved to the lab: says the new name."""

raise SystemExit(
    "error: moved: python -m lab.studies, or python -m lab.studies.NAME for one of them"
)

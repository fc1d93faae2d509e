"""Files of a run's state: written whole or not at all, checked when read, for any number of ranks."""

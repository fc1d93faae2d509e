"""One question of the field each, beside published figures."""

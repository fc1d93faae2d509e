"""The fixtures of tests/fixtures.py, which the tests of the product and of the lab share."""

from fixtures import *  # noqa: F403

"""Helpers shared by the tests; no tests here."""

from __future__ import annotations

import os

# What CI has no time for: AOF2_TESTS_LONG=1 scripts/test.
LONG = bool(os.environ.get("AOF2_TESTS_LONG"))

"""What all tests share: the same examples every time, and no library that asks the network for a newer release."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

# The same examples in every run: a failure seen once is seen again. Deadlines are off, since no test measures time.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

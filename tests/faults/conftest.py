"""Every fault is met under both kinds of acknowledgement, unless a test says otherwise."""

from __future__ import annotations

from typing import cast

import pytest


@pytest.fixture(params=[False, True], ids=["early", "late"])
def acks_late(request: pytest.FixtureRequest) -> bool:
    """When the worker acknowledges: before it runs a task, or after."""
    return cast("bool", request.param)

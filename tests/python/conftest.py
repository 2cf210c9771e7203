"""Fixtures of more than one file."""

import pytest
from deltic import _library, _native


@pytest.fixture
def taken(monkeypatch):
    """The calls so far, by whether they were direct."""
    found = []

    def watched(function):
        def call(*args):
            result = function(*args)
            found.append(result is not None)
            return result

        return call

    for name in ("DIRECT_FORWARD", "DIRECT_DECODE"):
        monkeypatch.setattr(_native, name, watched(getattr(_library, name)))
    return found

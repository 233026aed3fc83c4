"""Fixtures and hooks of the library's tests, for the laboratory's as well."""

from tests.conftest import (  # noqa: F401
    _nan_filled_memory,
    _seeded,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    smollm2,
    tiny,
)

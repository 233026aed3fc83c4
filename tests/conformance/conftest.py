"""One parameter for the whole suite: every preset that the registry knows, whoever wrote it, and some variants."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import packedkv

# deterministic and short: the same examples on every machine; most methods have several presets
settings.register_profile(
    "conformance",
    derandomize=True,
    max_examples=4,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regen-golden",
        action="store_true",
        help="rewrite tests/golden from the code as it is (pytest tests/conformance --regen-golden); shows in the diff",
    )


VARIANTS = (
    "hqmq-s24_r3:outliers=3",
    "hqmq-s48_r4:packing=radix",
    "int-4:outliers=3",
    "saw-int4:zero=float,pack=halves",
    "turboquant-3:sink=4",
    "ultraquant:scale=real",
    "ultra-tq:norm=block,table=calibrated",
)
"""Options that change bytes, constants or what attention does, and are no preset."""

SPECS = (*packedkv.presets(), *VARIANTS)

CALIBRATED = (
    "ghost-3:transform=klt",
    "saw-int4:rotate=kv,hessian=true",
    "saw-int4:oscar=true",
    "saw-int4:kmeans=1",
    "saw-int4:kmeans=9,hessian=true",
)
"""Specs whose constants `packedkv fit` makes, of queries too."""


def beside_presets(*more: str) -> pytest.MarkDecorator:
    """Parametrize by every spec and some more."""
    return pytest.mark.parametrize("spec", [*SPECS, *more], indirect=True, scope="session")


def in_turn(name: str, values: Sequence[Any], ids: Callable[[Any], str] = str) -> pytest.MarkDecorator:
    """Parametrize by every spec beside one of ``values`` in turn; the other pairs are for wide runs."""
    count = len(values)
    pairs = [
        pytest.param(
            spec, value, marks=[] if j == (i + i // count) % count else pytest.mark.wide, id=f"{spec}-{ids(value)}"
        )
        for i, spec in enumerate(SPECS)
        for j, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("spec", name), pairs, indirect=["spec"], scope="session")


@pytest.fixture(scope="session", params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    """Every preset and variant, one after the other."""
    return request.param

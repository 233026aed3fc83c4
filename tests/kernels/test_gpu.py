"""The same cases on a GPU, and those that only a GPU can show: graphs, races, long sums."""

import pytest
import torch
from kernel_cases import CASES, GPU_ONLY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", [*CASES, *GPU_ONLY])
def test_case(name):
    {**CASES, **GPU_ONLY}[name]("cuda")

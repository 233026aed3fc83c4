"""The same cases on a GPU, and those that only a GPU can show: graphs, races, long sums."""

import pytest
import torch
from int4_cases import INT4_CASES, INT4_GPU_ONLY
from kernel_cases import CASES, GPU_ONLY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


ALL = CASES | GPU_ONLY | INT4_CASES | INT4_GPU_ONLY


@pytest.mark.parametrize("name", ALL)
def test_case(name):
    ALL[name]("cuda")

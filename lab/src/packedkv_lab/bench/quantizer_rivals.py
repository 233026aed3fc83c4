"""Other libraries' quantizers on the same tensors, where they do a job that a preset does: hqq and optimum-quanto.

Both quantize a matrix in groups along its rows; a token of a head is a row here, so that ``group=128`` at head_dim 128
is one scale per token and head, as ``int-4`` has it. Bits are those of the tensors they hold.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class QuantizerRival:
    """One quantizer of another library.

    Parameters
    ----------
    name : str
    module : str
        What must be importable.
    job : str
        The spec whose job it does.
    bits, group : int
    """

    name: str
    module: str
    job: str
    bits: int
    group: int

    @property
    def missing(self) -> bool:
        """Whether the library is not installed."""
        return importlib.util.find_spec(self.module.partition(".")[0]) is None or not _importable(self.module)

    def encode(self, x: Tensor) -> Any:
        """Quantize ``x [rows, D]``; returns what the library holds."""
        return _ENCODE[self.module](x, self.bits, self.group)

    def decode(self, held: Any) -> Tensor:
        """Dequantize what ``encode`` returned."""
        return _DECODE[self.module](held)

    def nbytes(self, held: Any) -> int:
        """Bytes of the tensors held."""
        return held_bytes(self.module, held)


def held_bytes(module: str, held: Any) -> int:
    """Bytes of the tensors that a library's module holds."""
    return _NBYTES[module](held)


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _hqq_encode(x: Tensor, bits: int, group: int) -> Any:
    quantizer = importlib.import_module("hqq.core.quantize").Quantizer
    # optimize=False is plain rounding, the job of int-4; the default refines zero points for weights
    return quantizer.quantize(
        x, nbits=bits, group_size=group, axis=1, optimize=False, device=str(x.device), compute_dtype=x.dtype
    )


def _hqq_decode(held: Any) -> Tensor:
    found = importlib.import_module("hqq.core.quantize").Quantizer.dequantize(*held)
    assert isinstance(found, Tensor)
    return found


def _hqq_nbytes(held: Any) -> int:
    codes, meta = held
    return int(codes.nbytes + meta["scale"].nbytes + meta["zero"].nbytes)


def _quanto_encode(x: Tensor, bits: int, group: int) -> Any:
    quanto = importlib.import_module("optimum.quanto")
    kind = {2: quanto.qint2, 4: quanto.qint4}[bits]
    scale, shift = quanto.MaxOptimizer()(x, qtype=kind, axis=0, group_size=group)
    return quanto.quantize_weight(x, qtype=kind, axis=0, scale=scale, shift=shift, group_size=group)


def _quanto_decode(held: Any) -> Tensor:
    found = held.dequantize()
    assert isinstance(found, Tensor)
    return found


def _quanto_nbytes(held: Any) -> int:
    return int(held._data._data.nbytes + held._scale.nbytes + held._shift.nbytes)


_ENCODE: dict[str, Callable[[Tensor, int, int], Any]] = {
    "hqq.core.quantize": _hqq_encode,
    "optimum.quanto": _quanto_encode,
}
_DECODE: dict[str, Callable[[Any], Tensor]] = {"hqq.core.quantize": _hqq_decode, "optimum.quanto": _quanto_decode}
_NBYTES: dict[str, Callable[[Any], int]] = {"hqq.core.quantize": _hqq_nbytes, "optimum.quanto": _quanto_nbytes}


def quantizer_rivals(head_dim: int) -> list[QuantizerRival]:
    """Quantizers that do the job of ``int-4`` and ``int-2`` at this head_dim."""
    return [
        QuantizerRival(f"{library}-{bits}", module, f"int-{bits}", bits, head_dim)
        for library, module in (("hqq", "hqq.core.quantize"), ("quanto", "optimum.quanto"))
        for bits in (4, 2)
    ]

"""State of one role's tokens: dense in the sink, in slots of the pages, dense in the window.

A *slot* is a token's index in the pages. Slots are assigned in order and never rewritten while their token is cached.
Cropping or evicting inside a block of a token-grouped codec leaves dead slots: nothing is re-encoded. ``runs`` lists
the live slot ranges.
"""

from torch import Tensor

from packedkv.store.site import RoleSite


class RoleState(RoleSite):
    """Keys or values of a layer: dense sink, live runs of slots in the pages, dense window.

    Parameters
    ----------
    of : RoleSite
        Codec and constants.
    sink, window : Tensor ``[B, H, t, D]``
        Dense tokens, model basis.
    """

    def __init__(self, of: RoleSite, sink: Tensor, window: Tensor) -> None:
        super().__init__(of.role, of.codec, of.site, of.params, of.drawn)
        self.sink, self.window = sink, window
        self.runs: list[tuple[int, int]] = []
        self.remembered: Tensor | None = None

    @property
    def encoded(self) -> int:
        """Live encoded tokens."""
        return sum(b - a for a, b in self.runs)

    @property
    def next_slot(self) -> int:
        """Slot of the next block to write: the first block boundary after the last live slot."""
        unit = self.codec.block_tokens
        return -(-self.runs[-1][1] // unit) * unit if self.runs else 0

    def extend(self, slots: int) -> None:
        """Mark ``slots`` more slots live from ``next_slot`` on."""
        first = self.next_slot
        if self.runs and self.runs[-1][1] == first:
            self.runs[-1] = (self.runs[-1][0], first + slots)
        else:
            self.runs.append((first, first + slots))

    def remove(self, first: int, last: int) -> None:
        """Drop the encoded tokens ``[first, last)``, counted among the live encoded ones."""
        live, at = [], 0
        for a, b in self.runs:
            for lo, hi in ((0, first), (last, at + b - a)):
                x, y = a + max(lo - at, 0), a + min(hi, at + b - a) - at
                if x < y:
                    live.append((x, y))
            at += b - a
        self.runs = live

    @property
    def dense_tokens(self) -> int:
        """Number of dense tokens."""
        return self.sink.shape[2] + self.window.shape[2]

"""Shape-annotated tensor types.

The letters used everywhere: B batch, N observations (keys), M query times, H heads, C channels a
head, D width, J modes, F features. Annotations such as ``Float[Tensor, "B N H C"]`` say shapes to
the reader; the tests also check those of `osciformer.math` with jaxtyping. A plain install does not
need it, so the names fall back to inert stubs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int
else:
    try:
        from jaxtyping import Bool, Complex, Float, Int
    except ImportError:

        class _Unchecked:
            """Stands in for a jaxtyping dtype: ``Float[Tensor, "..."]`` is then just ``Tensor``."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Complex = Float = Int = _Unchecked

# What most modules take, by name: series and static features, tokens, and rows at query times.
Values = Float[Tensor, "B N F"]
Times = Float[Tensor, "B N"]
Mask = Bool[Tensor, "B N"]
Static = Float[Tensor, "B S"]
Tokens = Float[Tensor, "B N D"]
QueryTimes = Float[Tensor, "B M"]
Reads = Float[Tensor, "B M D"]

__all__ = ["Bool", "Complex", "Float", "Int", "Tensor"]

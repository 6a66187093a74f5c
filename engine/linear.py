"""y = x·Wᵀ + b, with the weight laid out once for the machine.

On a CPU, oneDNN multiplies by a weight blocked for its kernels 2 (one row) to
4 times (eight rows) as fast as by a plain one, which it would rearrange on
every call. The operator is the one that torch's own compiler emits; where
this build of torch lacks it, the plain product is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as fn

# The layout is chosen for this many rows. The one for 512 was the fastest, or
# within noise of it, from 1 to 512 rows.
_ROWS = 512

Linear = Callable[[Tensor], Tensor]


def _packs() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A function from [rows, in] to [rows, out] for a weight [out, in]. The weight is not kept
    where it could be rearranged."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _packs():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise.default

        def packed_linear(x: Tensor) -> Tensor:
            product: Tensor = multiply(x, packed, bias, "none", [], "")
            return product

        return packed_linear
    return partial(fn.linear, weight=weight, bias=bias)

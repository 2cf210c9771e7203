"""beta from its logit: ``scale * sigmoid(x)``, in fp32."""

import torch
from torch import Tensor

from ..._call import wide
from ..._surface import surface


@surface(ahead=True)
def fused_beta_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """beta, differentiable."""
    return scale * torch.sigmoid(x.to(wide(x)))


@surface(ahead=True)
def fused_beta_sigmoid_fwd(x: Tensor, scale: float = 1.0) -> Tensor:
    """beta without a graph."""
    with torch.no_grad():
        return fused_beta_sigmoid(x, scale)


@surface(ahead=True)
def fused_beta_sigmoid_bwd(x: Tensor, dy: Tensor, scale: float = 1.0) -> Tensor:
    """The gradient of the logit for the gradient ``dy`` of beta, in the logit's dtype."""
    s = torch.sigmoid(x.detach().to(wide(x)))
    return (dy.to(s.dtype) * scale * s * (1 - s)).to(x.dtype)

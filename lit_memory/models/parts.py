"""Parts that several architectures share: norms, the short convolution over time, the gated feed-forward, heads.

Padding is at the end of the rows, as everywhere in a ``TokenRecurrent``.

Shape suffixes: B batch, T tokens, D width, H heads, K head width, X samples times heads, J kept inputs of a
convolution, S kept inputs and then new ones, C channels, G heads of keys and values, W rows that a window keeps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.plain import is_plain

L2_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class RMSNorm(nn.RMSNorm):
    """RMS norm in the precision of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Dropout(nn.Dropout):
    """Dropout that takes half a random number of 64 bits for each float, a third of torch's time on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        transformed = torch._C._are_functorch_transforms_active()  # vmap draws for every layer of its batch
        if not (self.training and self.p) or input.device.type != "cpu" or transformed:
            return super().forward(input)
        drawn = torch.empty(-(-input.numel() // 2), dtype=torch.int64).random_(-(2**63), None)
        kept = drawn.view(torch.int32)[: input.numel()].view(input.shape) >= round(self.p * 2**32) - 2**31
        return input * kept.to(input.dtype).div_(1 - self.p)


def fold_heads(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, D) -> (X, T, K)."""
    return x_BTD.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def unfold_heads(x_XTK: Tensor, heads: int) -> Tensor:
    """(X, T, K) -> (B, T, D)."""
    return x_XTK.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


class _L2Normalized(torch.autograd.Function):
    """One node of the graph, which keeps the result and the lengths, in place of five."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
        return x * scale, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        along = (grads[0] * y).sum(-1, keepdim=True) + grads[1] * scale
        return (grads[0] - y * along) * scale


def l2_normalized(x: Tensor) -> Tensor:
    """``x`` with rows of unit length."""
    return _L2Normalized.apply(x)[0]


class FeedForward(nn.Module):
    """Gated feed-forward without biases, after a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.up = nn.Linear(config.width, 2 * config.ff_width, bias=False)
        self.down = nn.Linear(config.ff_width, config.width, bias=False)

    def forward(self, rows_BTD: Tensor) -> Tensor:
        gate, up = self.up(self.norm(rows_BTD)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def causal_conv(conv: nn.Conv1d, x_BTC: Tensor, kept_BJC: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over time, (B, T, C), and the last inputs, which the next rows need.

    kept_BJC: the last inputs before, one less than the taps.
    """
    window_BSC = torch.cat([kept_BJC.to(x_BTC.dtype), x_BTC], dim=1)
    if is_plain(conv):  # by conv2d, as conv1d would copy
        out_BC1T = F.conv2d(window_BSC.mT.unsqueeze(2), conv.weight.unsqueeze(2), conv.bias, groups=conv.groups)
        out_BCT = out_BC1T.squeeze(2)
    else:
        out_BCT = conv(window_BSC.mT)
    return out_BCT.mT, last_rows(window_BSC, kept_BJC.shape[1], mask_BT).to(kept_BJC.dtype)


def last_rows(window_BSC: Tensor, count: int, mask_BT: Tensor | None) -> Tensor:
    """The last ``count`` real rows of ``count`` kept rows and then T new ones, whose padding is at the end."""
    if mask_BT is None:
        return window_BSC[:, window_BSC.shape[1] - count :].clone()  # a view would keep the whole segment alive
    rows_BC = mask_BT.sum(1, keepdim=True) + torch.arange(count, device=mask_BT.device)
    return window_BSC.gather(1, rows_BC.unsqueeze(-1).expand(-1, -1, window_BSC.shape[2]))


def newest(mask_BS: Tensor, count: int) -> Tensor:
    """The columns (B, count) of the last real ones in their order; where there are fewer, others stand before them."""
    return mask_BS.byte().argsort(dim=1, stable=True)[:, mask_BS.shape[1] - count :]


def newest_keys(
    k_BGSK: Tensor, v_BGSK: Tensor, mask_BS: Tensor, count: int, padded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask of the last ``count`` real columns. padded: whether some of the last may not be real."""
    if not padded:
        k, v = (t[:, :, -count:].clone() for t in (k_BGSK, v_BGSK))  # views would keep the whole segment alive
        return k, v, mask_BS[:, -count:].clone()
    columns_BW = newest(mask_BS, count)
    k, v = (t.take_along_dim(columns_BW[:, None, :, None], dim=2) for t in (k_BGSK, v_BGSK))
    return k, v, mask_BS.take_along_dim(columns_BW, dim=1)

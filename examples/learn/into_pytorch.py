"""Chapter 9: the Triton kernels as an operator of PyTorch: fake, gradient, torch.compile."""

import torch
import triton_attention
from torch import Tensor
from triton_attention import DEVICE

import flashattn


@torch.library.custom_op("learn::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return triton_attention.forward(q, k, v, q.shape[-1] ** -0.5, causal)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


@torch.library.custom_op("learn::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout = triton_attention.aligned(dout)
    delta = triton_attention.row_products(out, dout)
    rest = (dout, lse, delta, q.shape[-1] ** -0.5, causal)
    dk, dv = triton_attention.grad_kv(q, k, v, *rest)
    return triton_attention.grad_q(q, k, v, *rest), dk, dv


@attention_backward.register_fake
def _(dout, q, k, v, out, lse, causal) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def backward(ctx, dout: Tensor, dlse: Tensor | None):
    return *attention_backward(dout, *ctx.saved_tensors, ctx.causal), None


attention.register_autograd(backward, setup_context=setup_context)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 40, 2, 16, device=DEVICE, dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    torch.library.opcheck(attention, (q, k, v, True))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, True)[0].float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = flashattn.reference.attention(*(x.double() for x in (q, k, v)), causal=True)
    torch.testing.assert_close(
        compiled(q, k, v).double(), expected.square().sum(), rtol=1e-2, atol=0
    )
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for gradient, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), exact.double(), rtol=0, atol=2e-2)
    print("the operator passes opcheck and runs compiled in one graph, forward and backward")


if __name__ == "__main__":
    main()

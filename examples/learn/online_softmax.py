"""Chapter 5: softmax in PyTorch: naive, safe, online, and by merging the states of parts."""

import math

import torch
from torch import Tensor


def softmax_naive(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum()


def softmax_safe(x: Tensor) -> Tensor:
    p = (x - x.max()).exp()
    return p / p.sum()


def softmax_online(x: Tensor) -> Tensor:
    """Maximum and sum in one pass over x: Milakov and Gimelshein 2018, algorithm 3."""
    m, total = -math.inf, 0.0
    for value in x.tolist():
        m_new = max(m, value)
        reference = 0.0 if m_new == -math.inf else m_new  # -inf - -inf is NaN
        total = total * math.exp(m - reference) + math.exp(value - reference)
        m = m_new
    return (x - m).exp() / total


State = tuple[Tensor, Tensor]


def state_of(x: Tensor) -> State:
    """(m, l): the maximum of x and the sum of exp(x - m); (-inf, 0) of nothing, or of -inf."""
    m = x.max() if x.numel() else x.new_tensor(-math.inf)
    return m, (x - m).exp().sum() if m > -math.inf else x.new_tensor(0.0)


def merge(a: State, b: State) -> State:
    m = torch.maximum(a[0], b[0])
    reference = torch.where(m == -math.inf, 0.0, m)  # -inf - -inf is NaN
    total = a[1] * (a[0] - reference).exp() + b[1] * (b[0] - reference).exp()
    return m, total


def main() -> None:
    x = torch.randn(50, dtype=torch.float64)
    expected = x.softmax(0)
    for softmax in (softmax_naive, softmax_safe, softmax_online):
        torch.testing.assert_close(softmax(x), expected)
    assert softmax_naive(1000 * x).isnan().any()  # inf / inf
    torch.testing.assert_close(softmax_online(1000 * x), (1000 * x).softmax(0))
    hidden = x.masked_fill(torch.arange(50) < 20, -math.inf)
    torch.testing.assert_close(softmax_online(hidden), hidden.softmax(0))

    state = state_of(x[:0])
    for part in x.split(7):
        state = merge(state, state_of(part))
    torch.testing.assert_close(state, state_of(x))
    print("naive, safe, online and merged agree; the naive one overflows at large scores")


if __name__ == "__main__":
    main()

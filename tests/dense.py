"""The plain search: gradient ascent through the whole map, as the paper's experiments run it. For `make bench` only.

One word, one start, float64, 50 n steps of length 10 along the gradient, each followed by the projection onto the
ball; every step evaluates all n rows of the attention layer from its definition and differentiates through them.
"""

import math

import torch


def attention(X, W, score):
    s = X @ W @ X.T / math.sqrt(X.shape[1])
    if score == "softmax":
        return torch.softmax(s, dim=1) @ X
    a = torch.relu(s)
    return a / a.sum(dim=1, keepdim=True).clamp_min(1e-300) @ X


def search(X, W, score="softmax", word=0, steps=None, length=10.0):
    """Return the largest relative change found, and the seconds a step took are the caller's to measure."""
    n, d = X.shape
    base = attention(X, W, score)
    delta = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=X.dtype)
    delta *= math.sqrt(d) / delta.norm()
    row = torch.zeros(n, 1, dtype=X.dtype)
    row[word] = 1
    best = 0.0
    for _ in range(50 * n if steps is None else steps):
        delta.requires_grad_()
        change = (attention(X + row * delta, W, score) - base).norm() / base.norm()
        (slope,) = torch.autograd.grad(change, delta)
        best = max(best, change.item())
        with torch.no_grad():
            delta = delta + length * slope
            delta *= min(1.0, math.sqrt(d) / float(delta.norm()))
    return best


def retrain(phi, X, y):
    """Return the re-trained θ of texts (N + 1, n, d), the last one added: pseudo-inverse and explicit projector."""
    Phi = torch.stack([phi(x) for x in X])
    theta = torch.linalg.pinv(Phi[:-1]) @ y[:-1]
    off = torch.eye(Phi.shape[1], dtype=Phi.dtype) - torch.linalg.pinv(Phi[:-1]) @ Phi[:-1]
    w = off @ Phi[-1]
    return theta + w * (y[-1] - Phi[-1] @ theta) / (w @ w)

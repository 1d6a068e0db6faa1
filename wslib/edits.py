r"""What a map's features become when one word is replaced: exact, without recomputing the rest.

An edit object belongs to one text X (n, d) and to the words that may be edited, of which there are w. A trial is a
perturbation Δ of one word; trials come as ``delta`` (w, t, d), t for each word, and one call answers all of them:

    edit.squared(delta)    (w, t)     ‖φ(Xⁱ(Δ)) − φ(X)‖², differentiable in delta
    edit.distance(delta)   (w, t)     its square root
    edit.inner(delta, v)   (w, t)     ⟨φ(Xⁱ(Δ)), v⟩ for a vector v (p,); for vectors (m, p) the answers (m, w, t)
    edit.features(delta)   (w, t, p)  φ(Xⁱ(Δ))
    edit.norm              ()         ‖φ(X)‖

Attention costs O(n d + d²) a trial (the one-word identity, in the chapter on attention as a gate), random features
O(k d), anything else a full evaluation. :func:`edit` picks the class.
"""

import copy
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from wslib.features import (
    LOG_WEIGHTS,
    SCORES,
    Attention,
    DeepRandomFeatures,
    RandomFeatures,
    check_context,
    check_words,
    value_and_slope,
)


class Edit:
    """The edits of any callable: one full evaluation a trial. ``words``: which words, as in word_sensitivity."""

    def __init__(self, phi: Callable[[Tensor], Tensor], X: Tensor, words: str | int | Iterable[int] = "all") -> None:
        self.phi, self.X = phi, check_context(X, batch=False)
        self.words = check_words(words, len(X))
        self.base = self._evaluate(X)
        self.norm = self.base.norm()

    def _evaluate(self, X: Tensor) -> Tensor:
        value = self.phi(X)
        if not isinstance(value, Tensor):
            raise TypeError(f"phi must return a torch tensor, got {type(value).__name__}")
        if not torch.isfinite(value).all():
            raise ValueError("phi must return finite features, got NaN or infinity")
        return value.flatten()

    def select(self, part: list[int]) -> "Edit":
        """Return the edits of some of the words, given by their positions in ``self.words``."""
        return type(self)(self.phi, self.X, [self.words[i] for i in part])

    def features(self, delta: Tensor) -> Tensor:
        """Return φ(Xⁱ(Δ)), (w, t, d) → (w, t, p)."""
        rows = []
        for i, trials in zip(self.words, delta, strict=True):
            row = torch.zeros_like(self.X[:, :1])
            row[i] = 1
            rows.append(torch.stack([self._evaluate(self.X + row * trial) for trial in trials]))
        return torch.stack(rows)

    def squared(self, delta: Tensor) -> Tensor:
        """Return ‖φ(Xⁱ(Δ)) − φ(X)‖², (w, t, d) → (w, t)."""
        return (self.features(delta) - self.base).square().sum(-1)

    def distance(self, delta: Tensor) -> Tensor:
        """Return ‖φ(Xⁱ(Δ)) − φ(X)‖, (w, t, d) → (w, t)."""
        return self.squared(delta).sqrt()

    def inner(self, delta: Tensor, v: Tensor) -> Tensor:
        """Return ⟨φ(Xⁱ(Δ)), v⟩ for v (..., p), (w, t, d) → (..., w, t)."""
        inner = self.features(delta) @ v.reshape(-1, v.shape[-1]).T
        return inner.movedim(-1, 0).reshape(*v.shape[:-1], *delta.shape[:2])


class AttentionEdit(Edit):
    r"""One word of an attention layer.

    With word i replaced by x' = x_i + Δ, a row j ≠ i of A X becomes c'_j x' + e'_j m_j, where m_j is the average of all
    words but i with the weights of row j. For a normalised score c' = a(t)/(Z_j + a(t)) and e' = 1 − c', with the new
    score t = q_j·x' and Z_j the sum of row j's weights without word i; where a never vanishes, through logarithms:
    c' = σ(log a(t) − log Z_j). For linear scores c' = t/n and e' = 1. Row i alone, whose query changes, is new.
    """

    def __init__(self, phi: Attention, X: Tensor, words: str | int | Iterable[int] = "all") -> None:
        self.phi, self.X = phi, check_context(X, d=phi.d, batch=False)
        self.words = check_words(words, len(X))
        self.log_weight = LOG_WEIGHTS.get(phi.score)
        self.layer = Attention(phi.W.to(X), phi.b.to(X), phi.score, phi.temperature)  # cast once, not at every trial
        self.q = phi.queries(X)
        self.scores = self.q @ X.T
        self.base = phi(X)
        self.norm = self.base.norm()
        self._leave_out()

    def select(self, part: list[int]) -> "AttentionEdit":
        """Return the edits of some of the words, given by their positions in ``self.words``."""
        chosen = copy.copy(self)
        chosen.words = [self.words[i] for i in part]
        for name in ("others", "z", "m", "share", "m_norm", "m_x", "x", "x_norm", "c", "e", "old"):
            value = getattr(self, name)
            setattr(chosen, name, None if value is None else value[part])
        return chosen

    def _leave_out(self) -> None:
        """Prepare, for every word i asked for and every row j, what the row holds without word i."""
        index = torch.tensor(self.words, device=self.X.device)
        others = torch.ones(len(index), len(self.X), dtype=torch.bool, device=self.X.device)
        others[torch.arange(len(index)), index] = False  # (w, n): every word but i
        if self.log_weight:
            s = torch.where(others[:, None], self.log_weight(self.scores), -torch.inf)  # (w, n, n)
            self.z = s.logsumexp(dim=-1)  # ℓ_j, and -inf in a text of one word
            share = torch.exp(s - torch.where(self.z.isfinite(), self.z, 0.0)[..., None])
        else:
            a = SCORES[self.phi.score](self.scores) * others[:, None]
            self.z = a.sum(dim=-1)
            whole = len(self.X) if self.phi.score == "linear" else self.z[..., None]
            share = torch.where(self.z[..., None] > 0, a / whole, 0.0) if self.phi.score != "linear" else a / whole
        self.others = others
        # x'·m_j is needed for every trial: (x' Xᵀ) shareᵀ costs n² for it, x' mᵀ costs n d. Keep the cheaper.
        self.m = share @ self.X if len(self.X) > self.X.shape[1] else None
        self.share = share if self.m is None else None
        m = share @ self.X if self.m is None else self.m
        self.m_norm = m.square().sum(-1)
        x = self.X[index]
        self.m_x = (m @ x[..., None])[..., 0]
        self.x, self.x_norm = x, x.square().sum(-1)
        self.c, self.e = self._gate(self.scores[:, index].T)
        self.old = self.base.reshape(self.X.shape)[index]  # row i before the edit

    def _gate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return (c, e) for scores t (w, ..., n) of the edited word."""
        z = self.z if t.ndim == 2 else self.z[:, None]
        if self.phi.score == "linear":
            return t / len(self.X), torch.ones_like(t)
        if self.log_weight:
            c = torch.sigmoid(self.log_weight(t) - z)
        else:
            a = SCORES[self.phi.score](t)
            total = z + a
            c = torch.where(total > 0, a / torch.where(total > 0, total, 1.0), 0.0)
        return c, 1 - c

    def _gate_slope(self, t: Tensor, c: Tensor) -> Tensor:
        """Return dc/dt at scores t (w, t, n) with gates c, row i's own masked."""
        others = self.others[:, None]
        if self.log_weight:
            return c * (1 - c) * value_and_slope(self.log_weight, t)[1] * others
        a, rise = value_and_slope(SCORES[self.phi.score], t)
        if self.phi.score == "linear":
            return rise / len(self.X) * others
        total = self.z[:, None] + a
        return torch.where(total > 0, (1 - c) * rise / torch.where(total > 0, total, 1.0), 0.0) * others

    def _weight_slope(self, s: Tensor, a: Tensor) -> Tensor:
        """Return a'(s) for the weights of row i, (w, t, n + 1): zero for the old word i."""
        if self.log_weight:
            return a * value_and_slope(self.log_weight, s)[1]
        there = torch.nn.functional.pad(self.others, (0, 1), value=True)[:, None]
        return value_and_slope(SCORES[self.phi.score], s)[1] * there

    def gates(self, delta: Tensor) -> Tensor:
        """Return c'_j, the share of row j that the edited word holds, (w, t, d) → (w, t, n); row i's own entry is 0."""
        t = (self.x[:, None] + delta) @ self.q.T
        return self._gate(t)[0] * self.others[:, None]

    def _own_weights(self, new: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, of row i after the edit, its query, the scores and weights a of all words, x' last, and Σ a."""
        q = self.layer.queries(new)
        s = torch.cat([q @ self.X.T, (q * new).sum(-1, keepdim=True)], dim=-1)
        there = torch.nn.functional.pad(self.others, (0, 1), value=True)[:, None]  # all but the old word i
        if self.log_weight:
            a = torch.softmax(torch.where(there, self.log_weight(s), -torch.inf), dim=-1)
            return q, s, a, torch.ones_like(s[..., :1])
        a = SCORES[self.phi.score](s) * there
        total = a.sum(-1, keepdim=True)
        if self.phi.score == "linear":
            return q, s, a, torch.full_like(total, len(self.X))
        return q, s, a, torch.where(total > 0, total, 1.0)  # all weights of an empty row are zero

    def _own_row(self, new: Tensor) -> Tensor:
        """Return row i after the edit, (w, t, d) → (w, t, d)."""
        _, _, a, total = self._own_weights(new)
        return (a[..., :-1] @ self.X + a[..., -1:] * new) / total

    def _parts(self, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x', x'·m_j, and the scores t_j = q_j·x' of the new word in all rows."""
        new = self.x[:, None] + delta
        new_m = new @ self.m.transpose(1, 2) if self.share is None else (new @ self.X.T) @ self.share.transpose(1, 2)
        return new, new_m, new @ self.q.T

    def squared(self, delta: Tensor) -> Tensor:
        """Return ‖φ(Xⁱ(Δ)) − φ(X)‖², (w, t, d) → (w, t), differentiable once: see :class:`_Squared`."""
        return _Squared.apply(delta, self)

    def inner(self, delta: Tensor, v: Tensor) -> Tensor:
        """Return ⟨φ(Xⁱ(Δ)), v⟩ for v (..., n d), (w, t, d) → (..., w, t)."""
        V = v.reshape(-1, *self.X.shape)
        if self.share is None:
            m_v = torch.einsum("wjd,mjd->mwj", self.m, V)
        else:
            m_v = torch.einsum("wjk,mjk->mwj", self.share, V @ self.X.T)
        new = self.x[:, None] + delta
        c1, e1 = self._gate(new @ self.q.T)
        rows = (c1 * (new @ V.transpose(1, 2)[:, None]) + e1 * m_v[:, :, None]) * self.others[:, None]
        own = torch.einsum("wtd,mwd->mwt", self._own_row(new), V[:, self.words])
        return (rows.sum(-1) + own).reshape(*v.shape[:-1], *delta.shape[:2])

    def features(self, delta: Tensor) -> Tensor:
        """Return φ(Xⁱ(Δ)), (w, t, d) → (w, t, n d)."""
        new = self.x[:, None] + delta
        c1, e1 = self._gate(new @ self.q.T)
        m = self.share @ self.X if self.m is None else self.m
        rows = c1[..., None] * new[:, :, None] + e1[..., None] * m[:, None]
        rows = torch.where(self.others[:, None, :, None], rows, self._own_row(new)[:, :, None])
        return rows.flatten(-2)


class _Squared(torch.autograd.Function):
    """‖φ(Xⁱ(Δ)) − φ(X)‖² of an attention layer, with its gradient written out: a third of autograd's time.

    The value is Σ_j ‖c'x' − c x_i + (e' − e) m_j‖² over the rows j ≠ i, whose terms meet only scalar products, plus
    ‖v‖², v the change of row i.
    """

    @staticmethod
    def forward(ctx, delta: Tensor, edit: AttentionEdit) -> Tensor:
        new, new_m, t = edit._parts(delta)
        c1, e1 = edit._gate(t)
        # Row i, masked here, is the last term.
        c, f, c1 = (z * edit.others[:, None] for z in (edit.c[:, None], e1 - edit.e[:, None], c1))
        norm, new_x = new.square().sum(-1, keepdim=True), (new * edit.x[:, None]).sum(-1, keepdim=True)
        m_norm, m_x = edit.m_norm[:, None], edit.m_x[:, None]
        along, across = c1 * norm - c * new_x + f * new_m, f * m_norm + c1 * new_m - c * m_x
        rows = c1 * along + f * across - c * (c1 * new_x - c * edit.x_norm[:, None, None] + f * m_x)
        q, s, a, total = edit._own_weights(new)
        own = (a[..., :-1] @ edit.X + a[..., -1:] * new) / total
        v = own - edit.old[:, None]
        if ctx.needs_input_grad[0]:
            # Row j: half the gradient is c' times the new row's change, and along q_j through its gate.
            normalised = edit.phi.score != "linear"
            gate = (along - across * normalised) * edit._gate_slope(t, c1)
            mean = (c1 * f) @ edit.share @ edit.X if edit.m is None else (c1 * f) @ edit.m
            half = c1.square().sum(-1, keepdim=True) * new - (c * c1).sum(-1, keepdim=True) * edit.x[:, None]
            half = half + mean + gate @ edit.q
            # Row i: the weights move by a'(s)/Σa, towards x_k and, normalised, away from the row itself.
            pull = torch.cat([v @ edit.X.T, (v * new).sum(-1, keepdim=True)], dim=-1)
            pull = (pull - normalised * (v * own).sum(-1, keepdim=True)) * edit._weight_slope(s, a) / total
            moved = pull[..., :-1] @ edit.X + pull[..., -1:] * new
            half = half + edit.layer.queries_back(moved) + pull[..., -1:] * q + a[..., -1:] / total * v
            ctx.save_for_backward(2 * half)
        return (rows.sum(-1) + v.square().sum(-1)).clamp_min(0)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        return g[..., None] * ctx.saved_tensors[0], None


class RandomFeaturesEdit(Edit):
    """One word of random features: u + V_i Δ.

    The blocks V_i of the words asked for are held while they have at most 2**27 entries (512 MB in float32), and
    drawn again, slice by slice, whenever they are needed beyond that.
    """

    def __init__(self, phi: RandomFeatures, X: Tensor, words: str | int | Iterable[int] = "all") -> None:
        self._prepare(phi, X, words)
        self.phi = phi
        self.base = phi.activate(self.u)
        self.norm = self.base.norm()

    def _prepare(self, first: RandomFeatures, X: Tensor, words: str | int | Iterable[int]) -> None:
        self.first, self.X = first, check_context(X, first.n, first.d, batch=False)
        self.words = check_words(words, len(X))
        self.u64 = first.preactivation(X.double())  # V is drawn for this, so once, and exactly
        self.u = self.u64.to(X)
        self._held = {}

    def select(self, part: list[int]) -> "RandomFeaturesEdit":
        """Return the edits of some of the words, given by their positions in ``self.words``."""
        chosen = copy.copy(self)
        chosen.words, chosen._held = [self.words[i] for i in part], {}
        return chosen

    @property
    def held(self) -> bool:
        """Whether the blocks are few enough to hold."""
        return len(self.words) * self.first.k * self.first.d <= 2**27

    def blocks(self, position: int) -> Iterable[tuple[slice, Tensor]]:
        """Return V_i of the word at ``position`` in ``words`` as slices of rows, in X's dtype."""
        drawn = ((rows, block.to(self.X)) for rows, block in self.first.blocks(self.words[position]))
        if not self.held:
            return drawn
        if position not in self._held:
            self._held[position] = list(drawn)
        return self._held[position]

    def shift(self, delta: Tensor) -> Tensor:
        """Return V_i Δ, (w, t, d) → (w, t, k)."""
        trials = (torch.cat([t @ V.T for _, V in self.blocks(i)], dim=-1) for i, t in enumerate(delta))
        return torch.stack(list(trials))

    def gram(self, position: int, weights: Tensor) -> Tensor:
        """Return V_iᵀ diag(weights) V_i (d, d), summed in float64, for the word at ``position`` in ``words``."""
        total = torch.zeros(self.X.shape[1], self.X.shape[1], dtype=torch.float64, device=self.X.device)
        for rows, V in self.blocks(position):
            some = weights[rows] != 0
            total += (V[some].T * weights[rows][some]) @ V[some]
        return total

    def features(self, delta: Tensor) -> Tensor:
        """Return φ(Xⁱ(Δ)), (w, t, d) → (w, t, k)."""
        return self.phi.activate(self.u + self.shift(delta))


class DeepRandomFeaturesEdit(RandomFeaturesEdit):
    """One word of deep random features: the first layer as in random features, the others applied to the result."""

    def __init__(self, phi: DeepRandomFeatures, X: Tensor, words: str | int | Iterable[int] = "all") -> None:
        self._prepare(phi.first, X, words)
        self.phi = phi
        self.base = phi.deepen(self.u[None])[0]
        self.norm = self.base.norm()

    def features(self, delta: Tensor) -> Tensor:
        """Return φ(Xⁱ(Δ)), (w, t, d) → (w, t, k)."""
        u = self.u + self.shift(delta)
        return self.phi.deepen(u.flatten(0, 1)).reshape(u.shape)


@functools.singledispatch
def edit(phi: Callable[[Tensor], Tensor], X: Tensor, words: str | int | Iterable[int] = "all") -> Edit:
    """Return the fastest exact edits known for ``phi`` at the text X (n, d); see the module's head for their use."""
    return Edit(phi, X, words)


edit.register(Attention)(AttentionEdit)
edit.register(RandomFeatures)(RandomFeaturesEdit)
edit.register(DeepRandomFeatures)(DeepRandomFeaturesEdit)

"""The losses of Head Similarity (arXiv 2605.07766), those of its baseline TransReID, and what teachers are trained with:
margin heads, the triplet loss, and the decorrelation of attention heads (ViT-HarDis).

    total = align_weight * L_align + hier_weight * (id_weight * L_hier(z_id) + head_weight * L_hier(z_head))

Everything is computed in float32 outside autocast: with 8 bits of mantissa two cosines near 1 are equal.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

NOTHING = -1e30  # stands for "no such pair" under a log-sum-exp; finite, so that its gradient is 0 and not NaN


def alignment_loss(z_t, z_id, has_face):
    """Identity-aware distillation: mean over the frames with a face of L_align = 1 - cos(z_t, z_id).

    z_t (B, E): the frozen teacher's embedding of the aligned face; z_id (B, E): the student's of the whole head;
    has_face (B,) bool. -> scalar; exactly 0, still attached to the graph, where no frame has a face."""
    with torch.autocast(z_id.device.type, enabled=False):
        distance = 1 - F.cosine_similarity(z_t.float(), z_id.float())          # (B,)
        return distance.masked_fill(~has_face, 0).sum() / has_face.sum().clamp(min=1)


def hierarchical_loss(z, identity, state, *, m12=0.1, m23=0.1, t=0.1, aggregate="lse"):
    """Softplus hierarchical loss for s(R1) > s(R2) > s(R3), s = cosine similarity.

    z (B, E) embeddings, identity (B,) and state (B,) integers; states need to differ only within an identity.
    R1: same identity and state, R2: same identity, other state, R3: another identity; never a picture with itself.
    For each anchor and (pos, neg, m) in (R1, R2, m12), (R2, R3, m23), (R1, R3, m12 + m23), our reading is

        lse:   t * softplus( lse(s_neg / t) + lse(-s_pos / t) + m / t )     lse = log-sum-exp over the anchor's pairs
        mean:  mean over all pos x neg of  t * softplus( (s_neg - s_pos + m) / t )

    averaged over the anchors that have both kinds, and summed over the three. -> scalar; 0, still attached, where
    no anchor has both. m12, m23 are margins in cosine, t > 0 is the temperature."""
    if aggregate not in ("lse", "mean"):
        raise ValueError(f"aggregate must be 'lse' or 'mean'; got {aggregate!r}")
    if not t > 0:
        raise ValueError(f"the temperature t must be positive; got {t}")
    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(z.float())
        s = z @ z.T                                                            # (B, B)
        same_person, same_look = identity[:, None] == identity, state[:, None] == state
        r1, r2, r3 = (same_person & same_look).fill_diagonal_(False), same_person & ~same_look, ~same_person
        violation = lse_violation if aggregate == "lse" else mean_violation
        return sum(violation(s, pos, neg, m, t) for pos, neg, m in ((r1, r2, m12), (r2, r3, m23), (r1, r3, m12 + m23)))


def lse_violation(s, pos, neg, m, t):
    """s (B, B); pos, neg (B, B) bool -> scalar. The two log-sum-exps are soft maxima: the hardest pairs count most. That of
    an anchor without such pairs is about NOTHING, and the anchor's loss 0."""
    hardest_neg = (s / t).masked_fill(~neg, NOTHING).logsumexp(dim=1)          # (B,)
    hardest_pos = (-s / t).masked_fill(~pos, NOTHING).logsumexp(dim=1)
    both = pos.any(dim=1) & neg.any(dim=1)
    return (t * F.softplus(hardest_neg + hardest_pos + m / t)).sum() / both.sum().clamp(min=1)


def mean_violation(s, pos, neg, m, t):
    """As lse_violation, every pair counting the same. One row a positive pair: no (B, B, B) tensor."""
    anchor, other = pos.nonzero(as_tuple=True)                                 # (number of positive pairs,)
    loss = t * F.softplus((s[anchor] - s[anchor, other][:, None] + m) / t)     # (pairs, B)
    weight = neg / (pos.sum(dim=1) * neg.sum(dim=1)).clamp(min=1)[:, None]     # (B, B): 1 / (pos x neg of the anchor)
    both = pos.any(dim=1) & neg.any(dim=1)
    return (loss * weight[anchor]).sum() / both.sum().clamp(min=1)


def reid_losses(features, logits, label):
    """TransReID (He et al., ICCV 2021): {"cross-entropy", "triplet", "total"}, each a scalar, total their sum.

    features (B, F, D), logits (B, F, classes) of its F = 5 features, the global one first; label (B,) class of the identity.
    Each loss is half that of the global feature and half the mean of the local ones'. The triplet's features are those before
    their batch norm, the logits come from those after it."""
    with torch.autocast(features.device.type, enabled=False):
        parts = {"cross-entropy": torch.stack([F.cross_entropy(part, label) for part in logits.float().unbind(1)]),    # (F,)
                 "triplet": torch.stack([batch_hard_triplet(part, label) for part in features.float().unbind(1)])}
        terms = {name: 0.5 * values[0] + 0.5 * values[1:].mean() for name, values in parts.items()}
        return {**terms, "total": sum(terms.values())}


def batch_hard_triplet(z, identity):
    """Soft-margin triplet loss (Hermans et al., arXiv 1703.07737): mean over the anchors that have both kinds of
    softplus(d(hardest positive) - d(hardest negative)), d Euclidean; z (B, E), identity (B,). -> scalar; 0, still attached,
    where no anchor has both. The hardest positive is the farthest picture of the identity, the hardest negative the nearest of another."""
    same = identity[:, None] == identity
    pos, neg = same.clone().fill_diagonal_(False), ~same
    d = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")         # (B, B); exact, and its gradient at distance 0 is 0
    farthest = d.masked_fill(~pos, NOTHING).amax(dim=1)                        # (B,)
    nearest = d.masked_fill(~neg, -NOTHING).amin(dim=1)
    both = pos.any(dim=1) & neg.any(dim=1)
    return F.softplus(farthest - nearest).sum() / both.sum().clamp(min=1)      # 0 where either is NOTHING


class MarginHead(nn.Module):
    """Class centres of a face recogniser: (embeddings (B, E) not normalised, labels (B,)) -> logits (B, classes).

    All logits are s * cos(theta), theta the angle between embedding and centre; each head below makes the true
    class's harder, with its published m and s unless told otherwise. `kernel` (E, classes) holds the centres."""
    s, eps = 64.0, 1e-3

    def __init__(self, embed_dim, classes, *, m=None, s=None):
        super().__init__()
        self.m, self.s = self.m if m is None else m, self.s if s is None else s
        self.kernel = nn.Parameter(F.normalize(torch.randn(embed_dim, classes), dim=0))

    def forward(self, embeddings, labels):
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = embeddings.float()
            cosine = F.normalize(embeddings) @ F.normalize(self.kernel.float(), dim=0)
            cosine = cosine.clamp(-1 + self.eps, 1 - self.eps)                 # (B, classes)
            true = F.one_hot(labels, cosine.shape[1]).bool()
            return self.s * torch.where(true, self.harder(cosine, embeddings), cosine)

    def shifted(self, cosine, angle):
        """cos(theta + angle), with theta + angle kept within (0, pi)."""
        return (cosine.acos() + angle).clamp(self.eps, math.pi - self.eps).cos()


class ArcFace(MarginHead):
    """ArcFace (Deng et al., CVPR 2019): the true class's logit is s * cos(theta + m)."""
    m = 0.5

    def harder(self, cosine, embeddings):
        """Cosines (B, classes), embeddings (B, E) -> what the true class's cosine becomes, (B, classes); here and below."""
        return self.shifted(cosine, self.m)


class CosFace(MarginHead):
    """CosFace (Wang et al., CVPR 2018): the true class's logit is s * (cos(theta) - m)."""
    m = 0.4

    def harder(self, cosine, embeddings):
        return cosine - self.m


class AdaFace(MarginHead):
    """AdaFace (Kim et al., CVPR 2022): the norm of an embedding stands for the quality of its picture.

    With the norm standardised by running statistics, clipped to [-1, 1] and called n, the true class's logit is
    s * (cos(theta - m * n) - (m + m * n)). h scales n, t_alpha is the momentum of the statistics."""
    m, h, t_alpha = 0.4, 0.333, 0.01

    def __init__(self, embed_dim, classes, **margins):
        super().__init__(embed_dim, classes, **margins)
        self.register_buffer("norm_mean", torch.tensor(20.0))
        self.register_buffer("norm_std", torch.tensor(100.0))

    def harder(self, cosine, embeddings):
        norms = embeddings.detach().norm(dim=1).clamp(0.001, 100)              # (B,)
        if self.training and len(norms) > 1:
            self.norm_mean.lerp_(norms.mean(), self.t_alpha)
            self.norm_std.lerp_(norms.std(), self.t_alpha)
        n = (self.h * (norms - self.norm_mean) / (self.norm_std + self.eps)).clamp(-1, 1)[:, None]     # (B, 1)
        return self.shifted(cosine, -self.m * n) - (self.m + self.m * n)


class SphereFaceR(MarginHead):
    """SphereFace-R (Liu et al., TPAMI 2022), v1 with hard feature normalisation: the true class's logit is
    s * cos(min(m * theta, pi)); its gradient is that of s * cos(theta) ("characteristic gradient detachment").

    Of its two margins and three normalisations, the one that differs from ArcFace in the margin only: it multiplies the angle."""
    m, s = 1.5, 30.0

    def harder(self, cosine, embeddings):
        return cosine + ((self.m * cosine.detach().acos()).clamp(max=math.pi).cos() - cosine.detach())


def facenet_triplet(z, identity, *, m=0.2):
    """FaceNet's triplet loss (Schroff et al., CVPR 2015): mean over the positive pairs of max(0, d(pos) - d(neg) + m), d the squared
    distance of unit embeddings; the negative is semi-hard, the nearest that is farther than the positive, or the farthest of all.

    z (B, E), identity (B,) -> scalar; 0, still attached, where no anchor has a pair of both kinds."""
    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(z.float())
        d = 2 - 2 * z @ z.T                                                    # (B, B)
        same = identity[:, None] == identity
        anchor, other = (same & ~same.all(dim=1)).fill_diagonal_(False).nonzero(as_tuple=True)  # (pairs,); same.all: no negative
        positive, negatives = d[anchor, other], d[anchor].masked_fill(same[anchor], NOTHING)   # (pairs,), (pairs, B)
        farther = negatives.masked_fill(negatives <= positive[:, None], -NOTHING).amin(dim=1)  # (pairs,)
        negative = torch.where(farther < -NOTHING, farther, negatives.amax(dim=1))
        return F.relu(positive - negative + m).sum() / max(1, len(anchor))


# ---------------------------------------------------------------- ViT-HarDis: decorrelated attention heads

def decorrelation_loss(attention, difficulty=None):
    """Hard sample-conditioned decorrelation of attention heads (ViT-HarDis; our reading of its abstract): mean of w * d.

    attention: the maps of a block, (B, heads, T, T), or a list of some blocks'; difficulty (B,), of nearest_wrong_centre.
    d (B,): mean over pairs of heads of their squared correlation, a head's map centred and of length 1. w (B,): difficulty,
    at least 0, without gradient, divided by its mean over the batch; 1 without difficulty. -> scalar; 0 for a single head."""
    blocks = [attention] if torch.is_tensor(attention) else attention
    redundancy = torch.stack([head_correlation(maps) for maps in blocks]).mean(dim=0)          # (B,)
    if difficulty is None:
        return redundancy.mean()
    w = difficulty.detach().float().clamp(min=0)
    return (w / w.mean().clamp(min=1e-6) * redundancy).mean()


def head_correlation(maps):
    """Attention maps (B, heads, T, T) -> (B,): mean over pairs of heads of their squared correlation, in [0, 1]."""
    with torch.autocast(maps.device.type, enabled=False):
        flat = maps.float().flatten(2)                                         # (B, heads, T * T)
        flat = F.normalize(flat - flat.mean(dim=2, keepdim=True), dim=2, eps=1e-4)  # of an even map only rounding is left: 0
        squared = (flat @ flat.transpose(1, 2)) ** 2                           # (B, heads, heads)
        H = maps.shape[1]
        return squared.triu(diagonal=1).sum(dim=(1, 2)) / max(1, H * (H - 1) // 2)


def nearest_wrong_centre(embeddings, centres, labels):
    """Embeddings (B, E), centres (E, classes), labels (B,) -> (B,): highest cosine with a centre of another class, in [-1, 1]."""
    with torch.autocast(embeddings.device.type, enabled=False):
        cosine = F.normalize(embeddings.float()) @ F.normalize(centres.float(), dim=0)         # (B, classes)
        return cosine.scatter(1, labels[:, None], -1).amax(dim=1)

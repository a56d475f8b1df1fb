"""losses.py: values worked out by hand or by a plain loop, and gradients that stay finite."""
import math

import pytest
import torch
import torch.nn.functional as F

from losses import (AdaFace, ArcFace, CosFace, SphereFaceR, alignment_loss, batch_hard_triplet, decorrelation_loss, facenet_triplet, head_correlation,
                    hierarchical_loss, nearest_wrong_centre, reid_losses)


def softplus(x):
    return math.log1p(math.exp(x))


def rows(*degrees):
    """Unit vectors in the plane at these angles."""
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def by_loops(z, identity, state, m12, m23, t, aggregate):
    """The definition in the docstring, written as loops over anchors and pairs."""
    z, n, total = F.normalize(z.double()), len(z), 0.0
    s = (z @ z.T).tolist()

    def relation(i, j):
        return "R3" if identity[i] != identity[j] else "R1" if state[i] == state[j] else "R2"

    for p, q, m in (("R1", "R2", m12), ("R2", "R3", m23), ("R1", "R3", m12 + m23)):
        losses = []
        for i in range(n):
            pos = [s[i][j] for j in range(n) if j != i and relation(i, j) == p]
            neg = [s[i][j] for j in range(n) if j != i and relation(i, j) == q]
            if pos and neg and aggregate == "lse":
                losses.append(t * softplus(math.log(sum(math.exp(x / t) for x in neg)) + math.log(sum(math.exp(-x / t) for x in pos)) + m / t))
            elif pos and neg:
                losses.append(sum(t * softplus((b - a + m) / t) for a in pos for b in neg) / len(pos) / len(neg))
        total += sum(losses) / len(losses) if losses else 0.0
    return total


def test_alignment_is_one_minus_cosine_averaged_over_frames_with_a_face():
    z_t, z_id = rows(0, 0, 0), rows(0, 60, 180)
    assert alignment_loss(z_t, z_id, torch.tensor([True, True, True])).item() == pytest.approx((0 + 0.5 + 2) / 3, abs=1e-6)
    assert alignment_loss(z_t, z_id, torch.tensor([False, True, False])).item() == pytest.approx(0.5, abs=1e-6)
    assert alignment_loss(5 * z_t, 0.1 * z_id, torch.tensor([False, True, False])).item() == pytest.approx(0.5, abs=1e-6)


def test_alignment_without_any_face_is_exactly_zero_and_still_attached():
    z_id = rows(10, 20).requires_grad_()
    loss = alignment_loss(torch.zeros(2, 2), z_id, torch.tensor([False, False]))
    loss.backward()
    assert loss.item() == 0 and torch.equal(z_id.grad, torch.zeros(2, 2))


def test_frames_without_a_face_get_no_gradient_from_the_alignment():
    z_id = rows(10, 20).requires_grad_()
    alignment_loss(rows(0, 0), z_id, torch.tensor([True, False])).backward()
    assert z_id.grad[0].abs().sum() > 0 and torch.equal(z_id.grad[1], torch.zeros(2))


def test_hierarchical_loss_of_four_pictures_is_the_hand_value():
    # pictures 0, 1: one look at 0 and 60 degrees; picture 2: another look at 90; picture 3: another person at 180
    z, identity, state = rows(0, 60, 90, 180), torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2])
    c60, c30, c90, c120, c180 = 0.5, math.sqrt(3) / 2, 0.0, -0.5, -1.0
    t, m = 0.5, 0.1
    r1_r2 = [c90 - c60, c30 - c60]                             # anchors 0 and 1: one R1 and one R2 pair each
    r2_r3 = [(c180, [c90]), (c120, [c30]), (c90, [c90, c30])]  # anchors 0, 1, 2: R3 score, R2 scores
    r1_r3 = [c180 - c60, c120 - c60]
    expected = sum(t * softplus((d + m) / t) for d in r1_r2) / 2
    expected += sum(t * softplus(neg / t + math.log(sum(math.exp(-p / t) for p in pos)) + m / t) for neg, pos in r2_r3) / 3
    expected += sum(t * softplus((d + 2 * m) / t) for d in r1_r3) / 2
    assert hierarchical_loss(z, identity, state, m12=m, m23=m, t=t).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregate", ["lse", "mean"])
def test_hierarchical_loss_equals_its_definition_in_loops(aggregate):
    torch.manual_seed(0)
    z, identity = torch.randn(14, 5), torch.tensor([0] * 5 + [1] * 4 + [2] * 4 + [3])
    state = torch.tensor([0, 0, 1, 1, 2, 0, 0, 1, 1, 7, 7, 7, 7, 0])  # numbered within an identity
    expected = by_loops(z, identity.tolist(), state.tolist(), 0.1, 0.2, 0.15, aggregate)
    assert hierarchical_loss(z, identity, state, m12=0.1, m23=0.2, t=0.15, aggregate=aggregate).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("aggregate", ["lse", "mean"])
def test_gradient_agrees_with_finite_differences(aggregate):
    torch.manual_seed(1)
    z, identity, state = torch.randn(6, 4), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 0, 0, 1])
    z.requires_grad_()
    hierarchical_loss(z, identity, state, t=0.5, aggregate=aggregate).backward()
    direction, eps = torch.randn(6, 4), 1e-2
    up, down = (hierarchical_loss(z.detach() + sign * eps * direction, identity, state, t=0.5, aggregate=aggregate) for sign in (1, -1))
    assert ((up - down) / (2 * eps)).item() == pytest.approx((z.grad * direction).sum().item(), rel=1e-2)


def test_a_gradient_step_moves_the_mean_similarities_toward_the_order():
    torch.manual_seed(2)
    z, identity, state = torch.randn(8, 16, requires_grad=True), torch.arange(2).repeat_interleave(4), torch.arange(4).repeat_interleave(2)
    before = hierarchical_loss(z, identity, state)
    before.backward()
    assert hierarchical_loss(z.detach() - 0.5 * z.grad, identity, state) < before


@pytest.mark.parametrize("aggregate", ["lse", "mean"])
@pytest.mark.parametrize("identity, state", [([0, 0, 0], [0, 0, 0]), ([0, 1, 2], [0, 1, 2]), ([0, 0, 1, 1], [0, 0, 1, 1]), ([0], [0])],
                         ids=["one identity", "only different identities", "one state an identity", "one picture"])
def test_batches_without_some_relation_give_finite_loss_and_gradient(identity, state, aggregate):
    z = torch.randn(len(identity), 4, requires_grad=True)
    loss = hierarchical_loss(z, torch.tensor(identity), torch.tensor(state), aggregate=aggregate)
    loss.backward()
    assert math.isfinite(loss.item()) and z.grad.isfinite().all()
    if len(set(identity)) in (1, len(identity)):
        assert loss.item() == 0  # no anchor has both kinds of pairs


def test_two_identical_pictures_give_finite_gradients():
    z = torch.ones(4, 8, requires_grad=True)
    hierarchical_loss(z, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2]), t=0.01).backward()
    assert z.grad.isfinite().all()


def test_losses_are_float32_inside_bfloat16_autocast():
    z, identity, state = torch.randn(8, 16), torch.arange(4).repeat_interleave(2), torch.arange(8)
    plain = hierarchical_loss(z, identity, state), alignment_loss(z, z + 0.1, torch.ones(8, dtype=torch.bool))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = hierarchical_loss(z, identity, state), alignment_loss(z, z + 0.1, torch.ones(8, dtype=torch.bool))
    for a, b in zip(plain, mixed):
        assert b.dtype == torch.float32 and torch.equal(a, b)


def test_unknown_aggregate_and_zero_temperature_are_refused():
    z, labels = torch.randn(2, 2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="aggregate must be"):
        hierarchical_loss(z, labels, labels, aggregate="max")
    with pytest.raises(ValueError, match="must be positive; got 0"):
        hierarchical_loss(z, labels, labels, t=0)


# What the published definitions give for these inputs; AdaFace with m 0.4, h 0.333, t_alpha 0.01 and statistics that
# start at 20 and 100, ArcFace with m 0.5, CosFace with m 0.4; s 64 each.
EMBEDDINGS = [[-5.629199, -5.761801, -1.252893, -2.169394, 4.243552, 3.460046, -1.580064, -10.576097],
              [3.222749, -12.633348, 3.499832, 3.081339, 1.198415, 12.376579, 11.167772, -2.472782],
              [-27.053074, -33.918625, 11.333013, 15.870167, 11.976789, -31.101902, -6.827208, 37.060123],
              [16.504169, -12.880946, -3.814728, 4.036515, 30.566055, 34.899353, 20.818563, -18.560888],
              [-18.407494, 0.947782, -14.78031, 7.452443, 13.190875, 3.372336, 19.22377, 13.234688],
              [-6.138579, 47.546638, -17.380062, 3.150449, 31.371628, 138.132324, -88.133636, -95.201324]]
KERNEL = [[-0.67309, 0.872831, 1.055357, 0.177844, -0.230335], [-0.391754, 0.543295, -0.395158, -0.446217, 0.744021],
          [1.52098, 3.410503, -1.531184, -1.234135, 1.819725], [-0.551529, -0.569248, 0.919971, 1.110816, 1.289874],
          [-1.478174, 2.567233, -0.47312, 0.335551, -0.003304], [-0.534441, 1.168688, 0.394503, 1.941462, 0.791498],
          [-0.020252, -0.43717, -1.535287, -0.412679, 0.966303], [1.624783, -0.365619, -1.30244, 0.099403, 0.441822]]
LABELS = [0, 1, 2, 3, 4, 0]
OTHERS = [[None, 7.9492, 17.2747, 13.8726, -18.5795], [-6.3184, None, -3.6746, 27.4649, 21.2997], [31.7792, -5.7271, None, -12.4975, 2.4601],
          [-41.2548, 25.9386, 8.6796, None, 9.8547], [-8.9249, -17.2674, -24.5733, 17.8709, None], [None, 19.1691, 32.7367, 37.3826, -1.0427]]
TRUE = {"AdaFace": [-55.6492, -13.0985, -48.6504, 9.1383, -16.1364, -61.7556], "AdaFace again": [-55.6457, -13.098, -48.6506, 9.139, -16.1361, -61.758],
        "ArcFace": [-53.4974, -19.1186, -48.6934, 5.4173, -22.0239, -56.526], "CosFace": [-55.7068, -13.0959, -48.4207, 9.7272, -16.1185, -60.817]}


def test_batch_hard_triplet_takes_the_farthest_of_the_person_and_the_nearest_of_the_others():
    z = torch.tensor([[0.0], [1.0], [3.0], [5.0]], requires_grad=True)
    # persons 0 0 0 1: anchors 0, 1, 2 have positives at most 3, 2, 3 away and the negative 5, 4, 2 away; anchor 3 has no positive
    loss = batch_hard_triplet(z, torch.tensor([0, 0, 0, 1]))
    assert loss.item() == pytest.approx((softplus(3 - 5) + softplus(2 - 4) + softplus(3 - 2)) / 3, abs=1e-6)
    loss.backward()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("identity", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]])
def test_triplet_of_equal_pictures_or_without_a_kind_of_pair_is_finite_with_its_gradient(identity):
    z = torch.ones(4, 3, requires_grad=True)
    loss = batch_hard_triplet(z, torch.tensor(identity))
    assert loss.item() == pytest.approx(math.log(2) if identity == [0, 0, 1, 1] else 0, abs=1e-6)
    loss.backward()
    assert z.grad.isfinite().all()


def test_reid_losses_weigh_the_global_feature_as_much_as_the_four_local_ones():
    torch.manual_seed(0)
    features, logits, label = torch.randn(6, 5, 8), torch.randn(6, 5, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    terms = reid_losses(features, logits, label)
    entropy = [F.cross_entropy(logits[:, i], label).item() for i in range(5)]
    triplet = [batch_hard_triplet(features[:, i], label).item() for i in range(5)]
    assert terms["cross-entropy"].item() == pytest.approx(0.5 * entropy[0] + 0.125 * sum(entropy[1:]), abs=1e-6)
    assert terms["triplet"].item() == pytest.approx(0.5 * triplet[0] + 0.125 * sum(triplet[1:]), abs=1e-6)
    assert terms["total"].item() == pytest.approx(terms["cross-entropy"].item() + terms["triplet"].item(), abs=1e-6)


@pytest.mark.parametrize("kind, loss", [(AdaFace, 57.31788), (ArcFace, 58.69954), (CosFace, 57.03117)])
def test_each_margin_head_agrees_with_its_published_definition_over_two_calls(kind, loss):
    head, embeddings, labels = kind(8, 5), torch.tensor(EMBEDDINGS), torch.tensor(LABELS)
    with torch.no_grad():
        head.kernel.copy_(torch.tensor(KERNEL))
    for call, expected in (("", loss), (" again" * (kind is AdaFace), 57.31747 if kind is AdaFace else loss)):
        logits = head(embeddings, labels)
        rows = [[true if other is None else other for other in others] for others, true in zip(OTHERS, TRUE[kind.__name__ + call])]
        assert torch.allclose(logits, torch.tensor(rows), atol=1e-3, rtol=0)
        assert F.cross_entropy(logits, labels).item() == pytest.approx(expected, abs=1e-3)
    if kind is AdaFace:
        assert (head.norm_mean.item(), head.norm_std.item()) == pytest.approx((20.59939, 98.64911), abs=1e-3)


def test_adaface_statistics_rest_in_evaluation_and_survive_a_batch_of_one():
    head = AdaFace(4, 3)
    head.eval()(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)
    assert head.train()(torch.randn(1, 4), torch.tensor([0])).isfinite().all()
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)


def test_spherefacer_multiplies_the_angle_stops_at_pi_and_keeps_the_slope_of_the_plain_cosine():
    head = SphereFaceR(2, 2)
    assert (head.m, head.s) == (1.5, 30.0)
    head.kernel.data = torch.eye(2)
    z = torch.tensor([[1.0, 1.0], [-3.0, 4.0]], requires_grad=True)                   # 45 degrees, and 126.87 from the first centre
    logits = head(z, torch.tensor([0, 0]))
    assert logits[0].tolist() == pytest.approx([30 * math.cos(math.radians(67.5)), 30 * math.sqrt(0.5)], rel=1e-5)
    assert logits[1].tolist() == pytest.approx([-30.0, 24.0], rel=1e-5)               # 1.5 * 126.87 is beyond 180
    slope, = torch.autograd.grad(logits[:, 0].sum(), z)
    plain, = torch.autograd.grad(30 * F.normalize(z)[:, 0].sum(), z)
    assert torch.allclose(slope, plain, atol=1e-5)


def test_facenets_triplet_takes_the_nearest_negative_that_is_farther_than_the_positive():
    angle = torch.tensor([0.0, 40.0, 20.0, 70.0]).deg2rad()
    z = 7 * torch.stack([angle.cos(), angle.sin()], dim=1)
    d = lambda degrees: 2 - 2 * math.cos(math.radians(degrees))
    # pair (0, 40): from 0 the negative at 70 is farther, 20 is too near; from 40 none is farther than 40 degrees, so the farthest, 70
    want = (max(0, d(40) - d(70) + 0.2) + max(0, d(40) - d(30) + 0.2)) / 2
    assert facenet_triplet(z, torch.tensor([0, 0, 1, 2])).item() == pytest.approx(want, abs=1e-6)
    z.requires_grad_()
    nothing = facenet_triplet(z, torch.zeros(4, dtype=torch.long))
    nothing.backward()
    assert nothing.item() == 0 and not z.grad.any()


def test_decorrelation_is_the_mean_squared_correlation_of_heads_weighted_by_difficulty():
    a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    c = torch.tensor([[1.0, 1.0], [0.0, 0.0]])                                        # uncorrelated with a
    maps = torch.stack([torch.stack([a, b, a]), torch.stack([a, c, a])])              # squared: 1, 1, 1 and 0, 1, 0
    assert head_correlation(maps).tolist() == pytest.approx([1, 1 / 3], abs=1e-6)
    assert decorrelation_loss(maps).item() == pytest.approx(2 / 3, abs=1e-6)
    assert decorrelation_loss(maps, torch.tensor([0.3, -0.5])).item() == pytest.approx(1.0, abs=1e-6)   # weights 2 and 0
    assert decorrelation_loss(maps, torch.tensor([0.1, 0.3])).item() == pytest.approx((0.5 + 1.5 / 3) / 2, abs=1e-6)
    assert decorrelation_loss([maps, maps[:, :1]]).item() == pytest.approx(1 / 3, abs=1e-6)              # one head has no pairs
    assert decorrelation_loss(maps, torch.tensor([-1.0, -1.0])).item() == 0


def test_the_difficulty_gets_no_gradient_and_the_maps_do():
    maps, z = torch.rand(3, 2, 4, 4, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    centres, labels = torch.randn(5, 4), torch.tensor([0, 3, 1])
    wrong = nearest_wrong_centre(z, centres, labels)
    cosine = F.normalize(z) @ F.normalize(centres, dim=0)
    assert wrong.tolist() == pytest.approx([max(cosine[row, c].item() for c in range(4) if c != label) for row, label in enumerate([0, 3, 1])], abs=1e-6)
    decorrelation_loss(maps, wrong).backward()
    assert z.grad is None and maps.grad.abs().sum() > 0


def test_even_attention_maps_are_not_correlated_by_rounding():
    assert head_correlation(torch.full((2, 3, 6, 6), 1 / 6)).tolist() == pytest.approx([0, 0], abs=1e-6)

"""losses.py: values worked out by hand or by a plain loop, and gradients that stay finite."""
import math

import pytest
import torch
import torch.nn.functional as F

from losses import AdaFace, alignment_loss, hierarchical_loss


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


# AdaFace's published definition (m 0.4, h 0.333, s 64, t_alpha 0.01; statistics start at 20 and 100) on these inputs.
EMBEDDINGS = [[-5.6292, -5.7618, -1.2529, -2.1694, 4.2436, 3.4600, -1.5801, -10.5761],
              [3.2227, -12.6333, 3.4998, 3.0813, 1.1984, 12.3766, 11.1678, -2.4728],
              [-27.0531, -33.9186, 11.3330, 15.8702, 11.9768, -31.1019, -6.8272, 37.0601],
              [16.5042, -12.8809, -3.8147, 4.0365, 30.5661, 34.8994, 20.8186, -18.5609],
              [-18.4075, 0.9478, -14.7803, 7.4524, 13.1909, 3.3723, 19.2238, 13.2347],
              [-6.1386, 47.5466, -17.3801, 3.1504, 31.3716, 138.1323, -88.1336, -95.2013]]
KERNEL = [[-0.6731, 0.8728, 1.0554, 0.1778, -0.2303], [-0.3918, 0.5433, -0.3952, -0.4462, 0.7440],
          [1.5210, 3.4105, -1.5312, -1.2341, 1.8197], [-0.5515, -0.5692, 0.9200, 1.1108, 1.2899],
          [-1.4782, 2.5672, -0.4731, 0.3356, -0.0033], [-0.5344, 1.1687, 0.3945, 1.9415, 0.7915],
          [-0.0203, -0.4372, -1.5353, -0.4127, 0.9663], [1.6248, -0.3656, -1.3024, 0.0994, 0.4418]]
LOGITS = [[-55.6492, 7.9492, 17.2747, 13.8726, -18.5795], [-6.3184, -13.0985, -3.6746, 27.4649, 21.2997],
          [31.7792, -5.7271, -48.6504, -12.4975, 2.4601], [-41.2548, 25.9386, 8.6796, 9.1383, 9.8547],
          [-8.9249, -17.2674, -24.5733, 17.8709, -16.1364], [-61.7556, 19.1691, 32.7367, 37.3826, -1.0427]]


def test_adaface_head_agrees_with_the_published_one_over_two_calls():
    head, embeddings, labels = AdaFace(8, 5), torch.tensor(EMBEDDINGS), torch.tensor([0, 1, 2, 3, 4, 0])
    with torch.no_grad():
        head.kernel.copy_(torch.tensor(KERNEL))
    logits = head(embeddings, labels)
    assert torch.allclose(logits, torch.tensor(LOGITS), atol=2e-2)  # the inputs above are rounded to 4 digits
    assert F.cross_entropy(logits, labels).item() == pytest.approx(57.31788, abs=2e-2)
    assert F.cross_entropy(head(embeddings, labels), labels).item() == pytest.approx(57.31747, abs=2e-2)
    assert (head.norm_mean.item(), head.norm_std.item()) == pytest.approx((20.59939, 98.64911), abs=1e-3)


def test_adaface_statistics_rest_in_evaluation_and_survive_a_batch_of_one():
    head = AdaFace(4, 3)
    head.eval()(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)
    assert head.train()(torch.randn(1, 4), torch.tensor([0])).isfinite().all()
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)

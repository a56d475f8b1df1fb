"""evaluate.py: the metrics by hand and by brute force, the table's words, the sheet's frames."""
import json
import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

import evaluate
from conftest import paint
from data import scan_heads
from model import HeadSimilarity, load_model, save_checkpoint
from teacher import AdaFaceViT


def test_verification_of_the_first_hand_case():
    result = evaluate.verification([.9, .8, .6, .4], [.7, .5, .3, .1, 0, -.1, -.2, -.3, -.4, -.5], [0, 0.05, 0.1, 0.2, 1])
    assert result["vr"] == {0: 0.5, 0.05: 0.5, 0.1: 0.75, 0.2: 1.0, 1: 1.0}
    assert result["auc"] == pytest.approx(0.925, abs=1e-12)
    assert result["threshold"][0] == pytest.approx(0.7) and result["threshold"][0.1] == pytest.approx(0.5)
    assert result["threshold"][1] == -math.inf
    assert (result["resolvable_far"], result["genuine"], result["impostor"]) == (0.1, 4, 10)


def test_verification_of_the_hand_case_with_ties():
    result = evaluate.verification([.9, .6, .6, .2], [.6] + [.1] * 9, [0, 0.05, 0.1])
    assert result["vr"] == {0: 0.25, 0.05: 0.25, 0.1: 1.0}
    assert result["auc"] == pytest.approx(0.95, abs=1e-12)


def test_verification_of_real_score_lists_equals_the_reference_values():
    with open(os.path.join(os.path.dirname(__file__), "pair_scores.json"), encoding="utf-8") as file:
        lists = json.load(file)
    for expected in lists.values():
        fars = [float(far) for far in expected["at_far"]]
        result = evaluate.verification(expected["genuine"], expected["impostor"], fars)
        assert result["auc"] == pytest.approx(expected["auc"], abs=1e-9)
        for far, values in zip(fars, expected["at_far"].values()):
            assert result["vr"][far] == pytest.approx(values["vr"], abs=1e-6)
            assert result["threshold"][far] == pytest.approx(values["accept_above"], abs=1e-6)


def test_achieved_far_never_exceeds_the_target():
    scores = np.random.default_rng(0).integers(0, 20, 1000) / 20  # many ties
    for far, threshold in evaluate.verification([0.5], scores, [1e-3, 0.01, 0.037, 0.1, 0.5])["threshold"].items():
        assert (scores > threshold).mean() <= far


def test_no_genuine_or_no_impostor_pairs_give_none_and_no_error():
    assert evaluate.verification([], [0.1], [0.1])["vr"] == {0.1: None}
    assert evaluate.verification([0.1], [], [0.1]) == {"auc": None, "vr": {0.1: None}, "threshold": {0.1: None}, "resolvable_far": None, "genuine": 1, "impostor": 0}


@pytest.mark.parametrize("far", [-0.1, 2, float("nan")])
def test_a_false_accept_rate_outside_0_to_1_is_refused(far):
    with pytest.raises(ValueError, match="false accept rate"):
        evaluate.verification([0.5], [0.1], [far])


def test_tiny_has_15_pairs_of_the_right_relations(tiny):
    index = scan_heads(tiny)
    pairs = evaluate.score_embeddings(torch.randn(6, 8), index.identity, index.state)
    assert pairs["pairs"] == {"R1": 2, "R2": 2, "R3": 11}
    assert (pairs["identity"]["genuine"], pairs["identity"]["impostor"]) == (4, 11)
    assert (pairs["head"]["genuine"], pairs["head"]["impostor"]) == (2, 13)


def clusters(people, looks, frames, *, E=64, seed=0):
    """Embeddings of people with looks of frames each -> z, identity, state."""
    generator = torch.Generator().manual_seed(seed)
    state = np.arange(people * looks * frames) // frames
    identity = state // looks
    parts = [torch.randn(count, E, generator=generator) for count in (people, people * looks, len(state))]
    return 0.7 * parts[0][identity] + 0.7 * parts[1][state] + parts[2], identity, state


def dense(z, identity, state, one_of=None):
    """-> {"R1": scores, ..} of all pairs from the whole matrix, rounded to the steps in which evaluate.py counts."""
    unit = evaluate.unit_rows(z)
    s = (unit @ unit.T).mul(evaluate.STEPS).round().clamp(-evaluate.STEPS, evaluate.STEPS).double().numpy() / evaluate.STEPS
    i, j = np.triu_indices(len(z), 1)
    if one_of is not None:
        i, j = i[one_of[i] | one_of[j]], j[one_of[i] | one_of[j]]
    person, look = identity[i] == identity[j], state[i] == state[j]
    return {"R1": s[i, j][look], "R2": s[i, j][person & ~look], "R3": s[i, j][~person]}


def test_counting_in_tiles_equals_the_dense_matrix_exactly_on_2000_vectors():
    z, identity, state = clusters(100, 4, 5)
    s, result = dense(z, identity, state), evaluate.score_embeddings(z, identity, state, [0, 1e-5, 1e-3, 0.1, 1])
    assert result["pairs"] == {name: len(scores) for name, scores in s.items()} == {"R1": 4000, "R2": 15000, "R3": 1980000}
    for task, genuine, impostor in (("identity", ("R1", "R2"), ("R3",)), ("head", ("R1",), ("R2", "R3"))):
        expected = evaluate.verification(*(np.concatenate([s[name] for name in names]) for names in (genuine, impostor)), [0, 1e-5, 1e-3, 0.1, 1])
        step = 1 / evaluate.STEPS  # so that rounding lets no impostor pass
        expected["threshold"] = {far: threshold + step for far, threshold in expected["threshold"].items()}
        assert {key: result[task][key] for key in expected} == expected
    for name, scores in s.items():
        assert result["ordering"]["mean"][name] == pytest.approx(scores.mean(), abs=1e-12)
        assert result["histogram"][name] == np.histogram(scores, evaluate.BINS, (-1, 1))[0].tolist()
    wins = np.searchsorted(np.sort(s["R2"]), s["R1"]).mean() / len(s["R2"])
    ties = (np.searchsorted(np.sort(s["R2"]), s["R1"], side="right") / len(s["R2"])).mean() - wins
    assert result["ordering"]["R1>R2"] == pytest.approx(wins + ties / 2, abs=1e-12)


def test_scores_in_float64_give_the_same_rates_and_an_auc_within_1e_9():
    z, identity, state = clusters(100, 4, 5)
    unit = torch.nn.functional.normalize(z.double())
    i, j = np.triu_indices(len(z), 1)
    s, person = (unit @ unit.T).numpy()[i, j], identity[i] == identity[j]
    expected, result = evaluate.verification(s[person], s[~person]), evaluate.score_embeddings(z, identity, state)["identity"]
    assert result["vr"] == expected["vr"] and result["auc"] == pytest.approx(expected["auc"], abs=1e-9)
    assert result["threshold"] == pytest.approx(expected["threshold"], abs=1e-6)


def test_shuffled_pictures_and_renamed_people_and_looks_change_nothing():
    z, identity, state = clusters(30, 3, 4)
    result = evaluate.score_embeddings(z, identity, state)
    order, names = np.random.default_rng(0).permutation(len(z)), np.random.default_rng(1).permutation(30)
    again = evaluate.score_embeddings(z[order], names[identity][order], (1000 - state)[order])
    for scores in (result, again):  # which people a seeded draw takes does depend on their order
        for task in ("identity", "head"):
            del scores[task]["interval"]
    assert result == again
    looks_by_person = evaluate.score_embeddings(z, identity, state % 3)  # numbered anew in each identity
    assert looks_by_person["pairs"] == result["pairs"] and looks_by_person["head"]["vr"] == result["head"]["vr"]


@pytest.mark.parametrize("tile", [1, 7, 64, 1000])
def test_tiles_of_any_size_count_the_same_pairs(tile):
    z, identity, state = clusters(9, 3, 4, E=8)
    chosen = np.random.default_rng(0).random(len(z)) < 0.3
    for one_of in (None, chosen):
        counted, s = evaluate.count_by_score(z, identity, state, one_of=one_of, watch=[0.2], tile=tile), dense(z, identity, state, one_of)
        assert counted.counts.sum(axis=1).tolist() == [len(scores) for scores in s.values()]
        for name, counts, pairs, above in zip(s, counted.counts, counted.pairs, counted.above[0]):
            assert np.repeat(counted.scores, counts) == pytest.approx(np.sort(s[name]), abs=2e-6)
            both = 2 if name == "R3" else 1  # such a pair stands with either identity
            assert pairs.sum() == both * len(s[name]) and above.sum() == both * (s[name] > 0.2).sum()


def test_small_counters_are_emptied_before_they_overflow(monkeypatch):
    z, identity, state = clusters(9, 3, 4, E=8)
    expected = evaluate.count_by_score(z, identity, state)
    monkeypatch.setattr(evaluate, "SMALL_COUNTER", 500)
    emptied = evaluate.count_by_score(z, identity, state, tile=20)
    assert emptied.counts.dtype == np.int64 and emptied.counts.sum() == expected.counts.sum() == 108 * 107 // 2
    assert emptied.counts @ emptied.scores == pytest.approx(expected.counts @ expected.scores, abs=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_equal_pictures_tie_whatever_their_embedding(seed):
    rng = np.random.default_rng(seed)
    which, identity = rng.integers(0, 3, 14), rng.integers(0, 3, 14)
    base = rng.standard_normal((3, 128)).astype("f4")
    unit = base.astype("f8") / np.linalg.norm(base.astype("f8"), axis=1, keepdims=True)
    i, j = np.triu_indices(14, 1)
    s, person = (unit @ unit.T).round(9)[which[i], which[j]], identity[i] == identity[j]
    result, expected = evaluate.score_embeddings(base[which], identity, identity, [0.2]), evaluate.verification(s[person], s[~person], [0.2])
    assert result["identity"]["vr"] == expected["vr"] and result["identity"]["auc"] == pytest.approx(expected["auc"], abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_threshold_of_the_counts_never_lets_more_float64_scores_pass_than_the_far(seed):
    z, identity, state = clusters(15, 2, 2, seed=seed)
    unit = torch.nn.functional.normalize(z.double())
    i, j = np.triu_indices(60, 1)
    impostor = (unit @ unit.T).numpy()[i, j][identity[i] != identity[j]]
    for far, threshold in evaluate.score_embeddings(z, identity, state, [0, 0.01, 0.1])["identity"]["threshold"].items():
        assert (impostor > threshold).mean() <= far


def test_scores_do_not_depend_on_the_length_of_the_embeddings():
    z, identity, state = clusters(15, 2, 2)
    results = [evaluate.score_embeddings(z * scale, identity, state) for scale in (1, 2.0 ** 80, 2.0 ** -80)]
    assert results[0] == results[1] == results[2]


def test_labels_that_do_not_go_with_the_embeddings_are_refused_and_no_picture_is_no_error():
    for arguments in ((torch.ones(3, 2), [0, 1], [0, 1, 2]), (torch.ones(3), [0] * 3, [0] * 3)):
        with pytest.raises(ValueError, match="must go together"):
            evaluate.score_embeddings(*arguments)
    assert evaluate.score_embeddings(torch.ones(0, 4), [], [])["pairs"] == {"R1": 0, "R2": 0, "R3": 0}


def test_pairs_are_counted_by_the_identities_that_take_part():
    z = torch.tensor([[1., 0], [1, 0.1], [0, 1], [0.1, 1], [-1, 0]])
    counted = evaluate.count_by_score(z, [7, 7, 7, 9, 9], [0, 0, 1, 2, 3], watch=[0.5])
    assert counted.pairs.tolist() == [[1, 0], [2, 1], [6, 6]]
    assert counted.above.tolist() == [[[1, 0], [0, 0], [1, 1]]]


def brute_force_bootstrap(z, identity, state, far, draws):
    """95 % intervals of both VRs, drawing people anew and weighing every single pair."""
    unit = evaluate.unit_rows(z)
    i, j = np.triu_indices(len(z), 1)
    s = (unit @ unit.T).numpy()[i, j]
    order = np.argsort(-s, kind="stable")
    i, j = i[order], j[order]
    same, look, rng, rates = identity[i] == identity[j], state[i] == state[j], np.random.default_rng(5), []
    for _ in range(draws):
        w = np.bincount(rng.integers(0, identity.max() + 1, identity.max() + 1), minlength=identity.max() + 1)
        weight = np.where(same, w[identity[i]], w[identity[i]] * w[identity[j]])
        for genuine in (same, look):
            impostors, accepted = np.cumsum(weight * ~genuine), np.cumsum(weight * genuine)
            rates.append(accepted[max(np.searchsorted(impostors, far * impostors[-1], side="right") - 1, 0)] / accepted[-1])
    return np.quantile(np.reshape(rates, (draws, 2)), [0.025, 0.975], axis=0).T


def test_the_interval_agrees_with_a_bootstrap_that_weighs_every_pair():
    z, identity, state = clusters(60, 3, 4, E=24)
    result = evaluate.score_embeddings(z, identity, state, [0.01])
    for task, expected in zip(("identity", "head"), brute_force_bootstrap(z, identity, state, 0.01, 300)):
        low, high = result[task]["interval"][0.01]
        assert low < result[task]["vr"][0.01] < high
        assert [low, high] == pytest.approx(expected, abs=0.25 * (high - low))
    assert result["identity"]["allowed_impostors"] == {0.01: int(0.01 * result["pairs"]["R3"])}
    assert evaluate.score_embeddings(z, identity, state, [0.01]) == result  # seeded


def test_fewer_than_10_people_give_no_interval():
    assert evaluate.score_embeddings(*clusters(9, 2, 3))["identity"]["interval"] == {1e-3: None, 1e-2: None}
    assert evaluate.score_embeddings(*clusters(10, 2, 3))["identity"]["interval"][1e-2] is not None


@pytest.mark.parametrize("labels", [([0] * 6, [0, 0, 0, 1, 1, 1]), ([0] * 6, [0] * 6), (range(6), range(6)), ([0], [0])])
def test_one_identity_one_look_only_strangers_and_one_picture_are_scored_without_an_error(labels):
    result = evaluate.score_embeddings(torch.randn(len(labels[0]), 4), *map(list, labels))
    n = len(labels[0])
    assert sum(result["pairs"].values()) == n * (n - 1) // 2
    if not result["identity"]["impostor"]:
        assert result["identity"]["vr"] == {1e-3: None, 1e-2: None} and result["identity"]["roc"] is None


def test_a_zero_or_non_finite_embedding_is_a_named_error():
    for bad in (0.0, float("nan"), float("inf")):
        z = torch.ones(3, 4)
        z[1] = bad
        with pytest.raises(ValueError, match="zero or not finite"):
            evaluate.score_embeddings(z, [0, 0, 1], [0, 0, 1])


def test_embeddings_do_not_depend_on_the_batch_size_and_the_last_partial_batch_is_kept(toy):
    torch.manual_seed(0)
    index, network = scan_heads(toy), HeadSimilarity(image_size=32, dim=32, depth=2, heads=2).eval()
    rows = np.arange(11)
    results = [evaluate.embed_rows(lambda heads: network(heads).z_id, index, rows, size=32, batch_size=size) for size in (1, 4, 5)]
    for z, kept, unreadable in results:
        assert kept.tolist() == rows.tolist() and not unreadable
        assert torch.allclose(z, results[0][0], atol=1e-5)


def table_row(name, z, identity, state, fars, trained_on=0):
    return {"name": name, "pictures": len(z), "people": len(set(identity)), "trained_on": trained_on,
            **evaluate.score_embeddings(z, identity, state, fars)}


def test_the_table_marks_a_far_that_the_data_cannot_resolve_and_gives_reasons(tiny, capsys):
    index = scan_heads(tiny)
    evaluate.print_table([table_row("student", torch.randn(6, 8), index.identity, index.state, [1e-3, 0.5])], [1e-3, 0.5])
    out = capsys.readouterr().out
    assert "15 pairs: 2 R1, 2 R2, 11 R3" in out and "*" in out and "1/11 = 0.091 for identity" in out
    assert "allowed at FAR 0.001: 0 (identity), 0 (head similarity); 0.5: 5 (identity), 6 (head similarity)" in out
    evaluate.print_table([table_row("student", torch.randn(2, 8), [0, 0], [0, 0], [0.5])], [0.5])
    out = capsys.readouterr().out
    assert "n/a" in out and "no pairs of R2 and R3" in out


def test_the_same_table_comes_in_markdown_with_intervals_and_says_who_was_trained_on(capsys):
    row = table_row("student, whole heads", *clusters(12, 2, 4), [0.01], trained_on=3)
    evaluate.print_table([row], [0.01], markdown=True)
    head, rule, line = capsys.readouterr().out.strip().splitlines()[:3]
    assert head.count("|") == rule.count("|") == line.count("|") == 11
    assert "identity verification VR@0.01" in head and line.startswith("| student, whole heads [trained on 3 of 12 people] | ")
    low, high = row["identity"]["interval"][0.01]
    assert line.split("|")[2].strip() == f"{row['identity']['vr'][0.01]:.3f} ({low:.3f}-{high:.3f})"
    evaluate.print_table([row], [0.01])
    assert f"{low:.3f}-{high:.3f}" in capsys.readouterr().out.splitlines()[4]


@pytest.mark.parametrize("options, message", [(["--json", "no/dir.json"], "no such folder to write"), (["--sheet", "x.foo"], "must name a .png"),
                                              (["--sheet", ".png"], "must name a .png"), (["--json", "."], "or it is a folder itself"),
                                              (["--json", "nowhere.pt"], "over an input or another output"),
                                              (["--faces", "faces"], "go with --data"), (["--batch-size", "0"], "--batch-size must")])
def test_options_that_cannot_be_are_refused_before_the_evaluation(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate.main(["--ckpt", "nowhere.pt", *options])


def test_a_folder_without_one_readable_picture_is_one_message(tiny, tmp_path):
    student = HeadSimilarity(image_size=16, dim=16, depth=1, heads=2)
    save_checkpoint(str(tmp_path / "s.pt"), {"kind": "student", "model": student.state_dict(), "trained": [], "teacher": None, "epoch": 1,
                                             "model_args": dict(image_size=16, dim=16, depth=1, heads=2)})
    for folder, _, names in os.walk(tiny):
        for name in names:
            open(os.path.join(folder, name), "wb").close()
    with pytest.raises(ValueError, match="not one of 6 pictures could be read"):
        evaluate.main(["--ckpt", str(tmp_path / "s.pt"), "--data", tiny, "--workers", "0"])


def test_every_unreadable_picture_is_named_whichever_network_met_it(tiny, tmp_path):
    index = scan_heads(tiny, faces=tiny)
    open(f"{tiny}/A/s0/0.jpg", "wb").close()
    student = HeadSimilarity(image_size=16, dim=16, depth=1, heads=2).eval()
    table, _, kept, unreadable = evaluate.evaluate({"student": student}, {}, index, np.arange(6))
    assert len(kept) == 5 and len(unreadable) == 1 and "A/s0/0.jpg" in unreadable[0] and table[0]["pictures"] == 5


def test_the_gallery_sheet_frames_the_most_similar_picture_of_the_same_look_in_green(tiny, tmp_path):
    index, path = scan_heads(tiny), str(tmp_path / "sheet.png")
    z = torch.tensor([[1, 0, 0], [1, 0.1, 0], [0.6, 0.8, 0], [0, 0, 1], [0, 0.1, 1], [-1, 0, 0.2]])
    evaluate.gallery_sheet(z, index, np.arange(6), path, queries=1, columns=5, side=40)
    sheet = Image.open(path)
    step = 40 + 8 + 2  # a cell and the padding between cells
    frames = [sheet.getpixel((2 + step * column + 2, 20)) for column in range(6)]
    assert frames == [evaluate.COLOURS[name] for name in (None, "R1", "R2", "R3", "R3", "R3")]


def test_json_of_a_report_is_readable_by_any_json_reader(tmp_path):
    path = str(tmp_path / "result.json")
    evaluate.write_json(path, {"threshold": {1.0: -math.inf}, "name": "Zoë -Infinity"})
    with open(path, encoding="utf-8") as file:
        assert json.load(file) == {"threshold": {"1.0": None}, "name": "Zoë -Infinity"}


def test_the_mirror_convention_adds_the_embedding_of_the_mirror_image_and_is_told(toy, tmp_path):
    index, student = scan_heads(toy), HeadSimilarity(image_size=32, dim=32, depth=1, heads=2).eval()
    torch.manual_seed(0)
    teacher = AdaFaceViT(image_size=32, dim=32, depth=1, heads=2).eval()
    rows = np.flatnonzero(index.has_face)[:40]
    table, *_ = evaluate.evaluate({"student": student}, {"teacher": teacher}, index, rows, flip_sum=True)
    assert [row["name"] for row in table] == ["teacher+mirror, aligned faces", "teacher+mirror, whole heads", "student, whole heads"]
    summed, kept, _ = evaluate.embed_rows(lambda faces: teacher(faces) + teacher(faces.flip(3)), index, rows, size=32, faces=True)
    plain, *_ = evaluate.embed_rows(teacher, index, rows, size=32, faces=True)
    assert table[0]["ordering"] == evaluate.score_embeddings(summed, index.identity[kept], index.state[kept])["ordering"]
    assert not torch.allclose(summed, 2 * plain, atol=1e-3)
    with pytest.raises(ValueError, match="--flip-sum and --colour are for a teacher"):
        save_checkpoint(str(tmp_path / "s.pt"), {"kind": "student", "model": {}, "model_args": {}, "trained": [], "teacher": None, "settings": None})
        evaluate.main(["--ckpt", str(tmp_path / "s.pt"), "--data", toy, "--flip-sum"])


def save_student(path, *, trained=(), thresholds=None, **sizes):
    torch.manual_seed(0)
    student = HeadSimilarity(**{"image_size": 16, "dim": 16, "depth": 1, "heads": 2, **sizes})
    save_checkpoint(path, {"kind": "student", "model": student.state_dict(), "trained": list(trained), "teacher": None, "epoch": 1, "settings": None,
                           "model_args": {"design": student.design, **student.sizes}, "thresholds": thresholds})
    return path


def test_several_checkpoints_share_one_table_and_pairs_without_a_face_have_a_row_of_their_own(toy, tmp_path, capsys):
    names = scan_heads(toy).names
    paths = [save_student(str(tmp_path / "one.pt"), trained=names[:5]), save_student(str(tmp_path / "two.pt"), design="shared")]
    evaluate.main(["--ckpt", *paths, "--data", toy, "--workers", "0", "--json", str(tmp_path / "r.json"), "--sheet", str(tmp_path / "s.png")])
    out = capsys.readouterr().out
    with open(tmp_path / "r.json", encoding="utf-8") as file:
        table = json.load(file)["table"]
    folder = tmp_path.name
    assert [row["name"] for row in table] == [f"{folder}/{name}.pt, {kind}" for name in ("one", "two") for kind in ("whole heads", "from behind")]
    assert [row["trained_on"] for row in table] == [5, 5, 0, 0] and "[trained on 5 of 48 people]" in out
    index = scan_heads(toy)
    faces, n = int(index.has_face.sum()), len(index.paths)
    assert sum(table[1]["pairs"].values()) == n * (n - 1) // 2 - faces * (faces - 1) // 2 < sum(table[0]["pairs"].values())
    for name, size in (("s.png", None), ("s-scores.png", (760, 4 * 320)), ("s-roc.png", (960, 470 + 4 * 18))):
        with Image.open(tmp_path / name) as picture:
            assert size is None or picture.size == size


def test_the_histogram_draws_each_relation_in_its_colour_where_its_scores_are(tmp_path):
    row = table_row("student", *clusters(12, 2, 4), [0.01])
    for name, bin_ in (("R1", 90), ("R2", 60), ("R3", 30)):
        row["histogram"][name] = [0] * bin_ + [10] + [0] * (evaluate.BINS - bin_ - 1)
    evaluate.histogram_sheet([row], 0.01, str(tmp_path / "h.png"))
    with Image.open(tmp_path / "h.png") as sheet:
        for name, bin_ in (("R1", 90), ("R2", 60), ("R3", 30)):
            x = round(60 + (bin_ + 0.5) / evaluate.BINS * 680)
            assert evaluate.COLOURS[name] in [sheet.getpixel((x + dx, 180)) for dx in range(-3, 4)]


# ---------------------------------------------------------------- compare

THRESHOLDS = {"head": 0.9, "identity": 0.5, "head_vr": 0.8, "identity_vr": 0.7, "mistaken_looks": 0.04, "far": 1e-3, "people": 100, "data": "heads",
              "resolvable_far": 1e-5}


@pytest.fixture
def clip(tmp_path):
    """A checkpoint with thresholds, a reference, and a folder of frames that move away from it."""
    for i in (1, 2, 9, 10):
        paint(f"{tmp_path}/clip/frame{i}.png", colour=(20 * i, 200 - 15 * i, 90))
    paint(f"{tmp_path}/reference.png", colour=(20, 185, 90))
    save_student(str(tmp_path / "s.pt"), thresholds={"id": THRESHOLDS, "head": {**THRESHOLDS, "head": 2.0, "identity": -2.0}})
    return tmp_path


def run_compare(folder, *more, clip="clip"):
    status = evaluate.main(["--ckpt", f"{folder}/s.pt", "--compare", f"{folder}/reference.png", f"{folder}/{clip}", "--workers", "0",
                            "--json", f"{folder}/c.json", *more])
    with open(f"{folder}/c.json", encoding="utf-8") as file:
        return status, json.load(file)


def test_a_clip_is_judged_frame_by_frame_in_the_order_of_its_numbers(clip, capsys):
    status, result = run_compare(clip, "--sheet", f"{clip}/c.png")
    out = capsys.readouterr().out
    assert status == 0 and [os.path.basename(frame["file"]) for frame in result["frames"]] == [f"frame{i}.png" for i in (1, 2, 9, 10)]
    model, preprocess = load_model(f"{clip}/s.pt")
    pictures = [preprocess(Image.open(name)).unsqueeze(0) for name in [f"{clip}/reference.png", *(frame["file"] for frame in result["frames"])]]
    scores = [model.similarity(pictures[0], picture).item() for picture in pictures[1:]]
    assert [frame["score"] for frame in result["frames"]] == pytest.approx(scores, abs=1e-5) and scores[0] == pytest.approx(1, abs=1e-5)
    assert [frame["relation"] for frame in result["frames"]] == ["R1" if s > 0.9 else "R2" if s > 0.5 else "R3" for s in scores]
    assert result["summary"]["mean"] == pytest.approx(np.mean(scores), abs=1e-5) and result["summary"]["minimum"] == pytest.approx(min(scores), abs=1e-5)
    assert "same look above 0.900: finds 80% of such pairs, and takes 4% of" in out and "same person above 0.500: finds 70%" in out
    assert "on 100 people of heads" in out and "4 of 4 frames scored: mean" in out
    with Image.open(f"{clip}/c.png") as sheet:
        assert sheet.getpixel((4, 20)) == evaluate.COLOURS[None] and sheet.getpixel((4 + 90, 20)) == evaluate.COLOURS["R1"]


def test_the_reference_is_no_frame_of_its_own_folder_but_may_be_compared_with_itself(clip):
    os.replace(f"{clip}/reference.png", f"{clip}/clip/frame0.png")
    argv = ["--ckpt", f"{clip}/s.pt", "--workers", "0", "--json", f"{clip}/c.json", "--compare", f"{clip}/clip/frame0.png"]
    for rest, expected in ((f"{clip}/clip", ["frame1.png", "frame2.png", "frame9.png", "frame10.png"]), (argv[-1], ["frame0.png"])):
        evaluate.main([*argv, rest])
        with open(f"{clip}/c.json", encoding="utf-8") as file:
            frames = json.load(file)["frames"]
        assert [os.path.basename(frame["file"]) for frame in frames] == expected
    assert frames[0]["score"] == pytest.approx(1, abs=1e-5) and frames[0]["score"] <= 1


def test_the_share_of_other_looks_that_pass_for_the_same_is_told():
    z, identity, state = clusters(20, 3, 4)
    s, result = dense(z, identity, state), evaluate.score_embeddings(z, identity, state, [0.01, 0.1])["head"]
    for far, threshold in result["threshold"].items():
        assert result["mistaken_looks"][far] == pytest.approx((s["R2"] >= threshold).mean(), abs=1e-12)
    assert 0 < result["mistaken_looks"][0.01] < result["mistaken_looks"][0.1]


def test_the_other_embedding_is_judged_by_its_own_thresholds(clip):
    assert {frame["relation"] for frame in run_compare(clip, "--embedding", "head")[1]["frames"]} == {"R2"}


def test_runs_of_frames_that_lost_the_look_are_told_with_their_first_and_last_frame():
    frames = [{"file": f"{i}.jpg", "score": score, "relation": relation} for i, (score, relation) in enumerate(
        [(0.95, "R1"), (0.6, "R2"), (0.2, "R3"), (0.93, "R1"), (None, None), (0.7, "R2")])]
    summary = evaluate.summarise(frames)
    assert summary["drift"] == [["1.jpg", "2.jpg", 2], ["5.jpg", "5.jpg", 1]]
    assert (summary["frames"], summary["minimum"], summary["at"], summary["R1"], summary["R2"], summary["R3"]) == (5, 0.2, "2.jpg", 2, 2, 1)
    assert summary["mean"] == pytest.approx(np.mean([0.95, 0.6, 0.2, 0.93, 0.7]))
    assert "1.jpg to 2.jpg (2 frames), 5.jpg" in summary["text"]
    assert "no drift" in evaluate.summarise(frames[:1])["text"]


def test_unreadable_frames_are_named_and_the_others_still_scored(clip, capsys):
    open(f"{clip}/clip/frame2.png", "wb").close()
    status, result = run_compare(clip, "--sheet", f"{clip}/c.png")
    assert status == 1 and len(result["unreadable"]) == 1 and "frame2.png" in result["unreadable"][0]
    assert [frame["relation"] is None for frame in result["frames"]] == [False, True, False, False]
    assert "left out: " in capsys.readouterr().out


def test_what_cannot_be_compared_is_one_message(clip, tmp_path):
    os.makedirs(f"{clip}/empty")
    open(f"{clip}/bad.png", "wb").close()
    for clip_name, message in (("empty", "no pictures to compare in this folder"), ("bad.png", "not one of 1 frames could be read"), ("gone.png", "gone.png")):
        with pytest.raises(ValueError, match=message):
            run_compare(clip, clip=clip_name)
    os.replace(f"{clip}/bad.png", f"{clip}/reference.png")
    with pytest.raises(ValueError, match="reference.png: not a readable picture"):
        run_compare(clip)
    paint(f"{clip}/reference.png")
    save_student(f"{clip}/s.pt")
    with pytest.raises(ValueError, match="comes without data of its own: add --data"):
        run_compare(clip)


@pytest.mark.parametrize("options, message", [
    (["--compare", "a.png"], "--compare needs a reference"), (["--compare", "a.png", "b.png", "--md"], "do not go with --compare"),
    (["--compare", ".", "b.png"], "the reference must be one picture")])
def test_options_that_do_not_go_with_compare_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate.main(["--ckpt", "nowhere.pt", *options])


def test_an_output_never_replaces_a_frame_of_the_clip(clip):
    before = open(f"{clip}/clip/frame2.png", "rb").read()
    with pytest.raises(ValueError, match="frame2.png would be written over an input"):
        run_compare(clip, "--sheet", f"{clip}/clip/frame2.png")
    assert open(f"{clip}/clip/frame2.png", "rb").read() == before


@pytest.mark.parametrize("wrong", [[1], {"id": 5}, {"id": {**THRESHOLDS, "head": "0.7"}}, {"id": {**THRESHOLDS, "far": float("nan")}}])
def test_thresholds_that_are_none_are_not_used(clip, wrong):
    save_student(f"{clip}/s.pt", thresholds=wrong)
    with pytest.raises(ValueError, match="comes without data of its own: add --data"):
        run_compare(clip)


def test_thresholds_can_be_set_on_other_people(clip, toy, capsys):
    _, result = run_compare(clip, "--data", toy, "--fars", "0.01")
    index, (model, _) = scan_heads(toy), load_model(f"{clip}/s.pt")
    z, kept, _ = evaluate.embed_rows(lambda heads: model(heads).z_id, index, np.arange(len(index.paths)), size=16)
    scores = evaluate.score_embeddings(z, index.identity[kept], index.state[kept], [0.01])
    assert result["thresholds"]["head"] == scores["head"]["threshold"][0.01] and result["thresholds"]["people"] == 48


# ---------------------------------------------------------------- the score as others use it

def test_the_similarity_of_a_picture_rises_with_one_gradient_step_on_it(tmp_path):
    model, preprocess = load_model(save_student(str(tmp_path / "s.pt")))
    torch.manual_seed(1)
    target, picture = torch.rand(1, 3, 16, 16) * 2 - 1, (torch.rand(1, 3, 16, 16) * 2 - 1).requires_grad_()
    before = model.similarity(picture, target)
    before.sum().backward()
    assert picture.grad.isfinite().all() and picture.grad.abs().sum() > 0
    with torch.no_grad():
        assert model.similarity(picture + 0.05 * picture.grad / picture.grad.norm(), target) > before


@pytest.mark.parametrize("which", ["id", "head"])
def test_scores_are_symmetric_do_not_depend_on_the_batch_and_are_1_for_the_same_picture(tmp_path, which):
    model, _ = load_model(save_student(str(tmp_path / "s.pt"), dim=32, depth=2))
    torch.manual_seed(2)
    a, b = torch.rand(2, 9, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        scores = model.similarity(a, b, which)
        assert torch.allclose(model.similarity(b, a, which), scores, atol=1e-5)
        assert torch.allclose(torch.cat([model.similarity(a[i:i + 1], b[i:i + 1], which) for i in range(9)]), scores, atol=1e-5)
        assert torch.allclose(model.similarity(a.flip(0), b.flip(0), which).flip(0), scores, atol=1e-5)
        assert torch.allclose(model.similarity(a, a, which), torch.ones(9), atol=1e-5)


GEOMETRY = json.load(open(os.path.join(os.path.dirname(__file__), "geometry.json"), encoding="utf-8"))


def test_ks_entropy_energy_and_rank_correlation_equal_the_reference_values():
    z, has = np.array(GEOMETRY["ks"]["embeddings"]), np.array(GEOMETRY["ks"]["attribute"])
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    across = 1 - z[has == 1] @ z[has == 0].T
    for value, name in ((1, "with_attribute"), (0, "without_attribute")):
        within = (1 - z[has == value] @ z[has == value].T)[np.triu_indices((has == value).sum(), 1)]
        assert evaluate.ks_statistic(within, across) == pytest.approx(GEOMETRY["ks"][name], abs=1e-6)
    for k, energy in GEOMETRY["energy"]["value"].items():
        steps = (GEOMETRY["energy"][step] for step in ("step0", "step1", "step2"))
        assert evaluate.invariance_energy(*steps, k=int(k)) == pytest.approx(energy, abs=1e-6)
    entropy, ranks = GEOMETRY["entropy"], GEOMETRY["spearman"]
    assert evaluate.intra_entropy(entropy["identity"], entropy["attribute"]) == pytest.approx(entropy["intra_entropy"], abs=1e-6)
    assert evaluate.spearman(ranks["x"], ranks["y"]) == pytest.approx(ranks["rho"], abs=1e-6)


def test_the_ks_statistic_with_ties_is_the_largest_difference_of_the_two_shares():
    a, b = (np.random.default_rng(seed).integers(0, 8, size) / 8 for seed, size in ((0, 41), (1, 30)))
    assert evaluate.ks_statistic(a, b) == pytest.approx(max(abs((a <= x).mean() - (b <= x).mean()) for x in [*a, *b]), abs=1e-12)
    assert evaluate.ks_statistic([1, 2], [3]) == 1 and evaluate.ks_statistic([1, 1, 2], [2, 1, 1]) == 0
    for wrong in ([], [float("nan")]):
        with pytest.raises(ValueError, match="two lists of numbers"):
            evaluate.ks_statistic(wrong, [1])


def test_an_attribute_that_parts_people_has_a_high_ks_statistic_and_one_that_does_not_a_low_one():
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(100), 3)
    z = rng.standard_normal((300, 16))
    parts, chance = identity % 2, rng.integers(0, 2, 100)[identity]
    z[:, 0] += 6 * parts
    high, low = (evaluate.attribute_ks(z, identity, values) for values in (parts, chance))
    assert high["mean"] > 0.5 > 0.15 > low["mean"] and high["people"] == 50 and evaluate.attribute_ks(z, identity, parts, most=7)["people"] == 7
    assert high == evaluate.attribute_ks(z, identity, parts) and high["mean"] == (high["with_attribute"] + high["without_attribute"]) / 2
    unknown = np.where(identity < 97, np.nan, parts)
    with pytest.raises(ValueError, match="1 people with it; 2 people without it"):
        evaluate.attribute_ks(z, identity, np.where(identity == 97, 1, np.where(identity > 97, 0, np.nan)))
    assert np.isnan(unknown).any() and evaluate.intra_entropy(identity, parts) == 0
    assert evaluate.intra_entropy([0, 0, 1, 1], [0, 1, 1, np.nan]) == pytest.approx(math.log(2) / 2)


def test_the_rank_correlation_of_nothing_to_rank_is_none():
    assert evaluate.spearman([1, 2], [3, 4]) is None and evaluate.spearman([1, 1, 1], [1, 2, 3]) is None
    assert evaluate.spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)


def test_the_energy_of_a_constant_field_is_0_and_of_a_random_one_1():
    rng = np.random.default_rng(0)
    x, v = rng.standard_normal((300, 512)), rng.standard_normal((300, 512))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    flat = np.zeros((300, 512))
    flat[:, :2] = np.stack([np.cos(np.arange(300)), np.sin(np.arange(300))], axis=1)
    up = 0.3 * np.eye(512)[5]
    assert evaluate.invariance_energy(flat - up, flat, flat + up, k=10) == pytest.approx(0, abs=1e-9)
    assert evaluate.invariance_energy(x - 0.01 * v, x, x + 0.01 * v, k=10) == pytest.approx(1, abs=0.05)
    assert evaluate.invariance_energy(x, x, x, k=10) is None
    moved = np.where(np.arange(300)[:, None] < 100, up, 0)
    assert evaluate.invariance_energy(flat - moved, flat, flat + moved, k=10) == pytest.approx(0, abs=1e-9)  # what rests is left out
    for wrong in ((x[:10], x[:10], x[:10], 10), (x, x, x, 0), (x[0], x[0], x[0], 1)):
        with pytest.raises(ValueError, match="k >= 1 and three finite steps"):
            evaluate.invariance_energy(*wrong)


@pytest.fixture
def small_student(tmp_path):
    """An untrained student for 32 pixels, and its teacher; -> (path, path of the teacher)."""
    torch.manual_seed(0)
    sizes = dict(image_size=32, patch_size=8, dim=16, depth=1, heads=2)
    student, network = HeadSimilarity(**sizes).eval(), AdaFaceViT(**sizes).eval()
    paths = [str(tmp_path / name) for name in ("s.pt", "t.pt")]
    save_checkpoint(paths[0], {"kind": "student", "model": student.state_dict(), "model_args": student.model_args, "trained": []})
    save_checkpoint(paths[1], {"kind": "teacher", "model": network.state_dict(), "model_args": {**sizes, "embed_dim": 16}, "trained": []})
    return paths


def test_attributes_and_energy_of_the_toy_world_end_in_two_tables_a_picture_and_json(small_student, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "PEOPLE", 2)
    monkeypatch.setattr(evaluate, "SETTINGS", 6)
    path, network = small_student
    evaluate.main(["--ckpt", path, "--teacher", network, "--data", toy, "--attributes", "--energy", "yaw", "hue", "nose", "--k", "3", "--workers", "0", "--device", "cpu",
                   "--json", str(tmp_path / "r.json"), "--sheet", str(tmp_path / "s.png")])
    out = capsys.readouterr().out
    assert "unknown attribute: nose; known here: yaw, roll, " in out and "rear: left out for teacher, aligned faces: needs at least 2 people" in out
    result = json.load(open(tmp_path / "r.json", encoding="utf-8"))
    rows = ["teacher, aligned faces", "teacher, whole heads", "student, whole heads"]
    assert list(result["attributes"]["ks"]) == rows and set(result["energy"]) == {"yaw", "hue"} and list(result["energy"]["yaw"]) == rows
    assert result["attributes"]["entropy"]["wide_face"] == 0 and 0.4 < result["attributes"]["entropy"]["bright"] < 0.7
    assert all(0 < energy < 2 for energies in result["energy"].values() for energy in energies.values())
    assert Image.open(tmp_path / "s.png").size[0] == 960


def test_a_folder_moves_in_brightness_contrast_and_hue_and_says_what_its_attributes_lack(small_student, tiny, tmp_path, capsys):
    path = small_student[0]
    common = ["--ckpt", path, "--data", tiny, "--workers", "0", "--device", "cpu"]
    evaluate.main([*common, "--energy", "--k", "1"])
    table = capsys.readouterr().out.split("invariance energy")[1]
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["brightness", "contrast", "hue"]
    with pytest.raises(ValueError, match="nobody has more than 10 pictures"):
        evaluate.main([*common, "--energy"])
    with pytest.raises(ValueError, match="attributes.csv: no such file"):
        evaluate.main([*common, "--attributes"])
    with open(os.path.join(tiny, "attributes.csv"), "w") as file:
        file.write("path,hat,same,odd,rare\nA/s0/0.jpg,1,1,2,1\nA/s1/2.jpg,-1,1,0,0\nB/s0/0.jpg,0,1,1,0\nB/s0/1.jpg,1,1,1,0\nC/s0/0.jpg,,1,0,0\nD/x.jpg,1,1,1,1\n")
    evaluate.main([*common, "--attributes", "hat", "same", "odd", "rare", "wig"])
    out = capsys.readouterr().out
    for line in ("odd: left out, since its values must be 0/1 or -1/1; found '2' at line 2", "ignored: 1 lines of attributes.csv that name no picture in use (first: D/x.jpg)",
                 "unknown attribute: wig; known here: hat, same, rare", "same: left out, since it has one value only, or none, in the 6 pictures",
                 "rare: left out for student, whole heads: needs at least 2 people on each side; 1 people with it; 3 people without it"):
        assert line in out.splitlines()
    assert ["hat", f"{math.log(2):.3f}"] in [line.split()[:2] for line in out.splitlines()]  # A and B have both values; of C nothing is known
    with pytest.raises(ValueError, match="no attribute to report on"):
        evaluate.main([*common, "--attributes", "wig"])
    for options, message in ((["--energy", "--sheet", str(tmp_path / "x.png")], "--energy has no picture"), (["--k", "0"], "--k must"), (["--k", "64"], "--k must be less than the 64"), (["--attributes", "--json", os.path.join(tiny, "attributes.csv")], "over an input"),
                             (["--compare", "a.jpg", "b.jpg", "--energy"], "do not go with --compare")):
        with pytest.raises(ValueError, match=message):
            evaluate.main([*common, *options])


def test_the_entropy_of_an_attribute_that_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match="no value is known"):
        evaluate.intra_entropy([0, 1], [math.nan, math.nan])


@pytest.mark.parametrize("option", ["--size", "--patch", "--dim", "--depth", "--heads", "--patch-stride", "--design"])
def test_evaluation_takes_no_size_since_the_checkpoint_tells_it(tmp_path, tiny, option):
    with pytest.raises(ValueError, match=f"unrecognized arguments: {option}"):
        evaluate.main(["--ckpt", save_student(str(tmp_path / "s.pt")), "--data", tiny, option, "16"])

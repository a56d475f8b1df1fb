"""evaluate.py: the metrics by hand and by brute force, the table's words, the sheet's frames."""
import json
import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

import evaluate
from data import scan_heads
from model import HeadSimilarity, save_checkpoint
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


def test_scores_equal_brute_force_and_ignore_order_and_names():
    rng = np.random.default_rng(0)
    z, identity = rng.normal(size=(60, 6)).astype(np.float32), rng.integers(0, 8, 60)
    state = identity * 3 + rng.integers(0, 3, 60)
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    found = {"R1": [], "R2": [], "R3": []}
    for i in range(60):
        for j in range(i + 1, 60):
            found["R3" if identity[i] != identity[j] else "R1" if state[i] == state[j] else "R2"].append(float(unit[i] @ unit[j]))
    result = evaluate.score_embeddings(z, identity, state, [0.01])
    assert result["pairs"] == {name: len(scores) for name, scores in found.items()}
    assert result["ordering"]["mean"] == pytest.approx({name: np.mean(scores) for name, scores in found.items()}, abs=1e-5)
    wins = np.mean([[a > b for b in found["R2"]] for a in found["R1"]])
    assert result["ordering"]["R1>R2"] == pytest.approx(wins, abs=1e-9)
    impostor = sorted(found["R3"], reverse=True)
    threshold = impostor[int(0.01 * len(impostor))]
    assert result["identity"]["vr"][0.01] == pytest.approx(np.mean([s > threshold for s in found["R1"] + found["R2"]]), abs=1e-9)
    order = rng.permutation(60)
    again = evaluate.score_embeddings(z[order], 100 - identity[order], 1000 - state[order], [0.01])
    assert again["head"]["vr"] == result["head"]["vr"] and again["identity"]["auc"] == pytest.approx(result["identity"]["auc"], abs=1e-9)


def test_blocks_of_any_size_find_the_same_pairs():
    z, identity, state = torch.randn(50, 4), torch.arange(50) % 5, torch.arange(50) % 10
    whole = evaluate.pair_scores(z, identity, state)
    for block in (1, 7, 50):
        parts = evaluate.pair_scores(z, identity, state, block)
        assert all(np.allclose(parts[name], whole[name], atol=1e-6) for name in whole)


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


def test_the_table_marks_a_far_that_the_data_cannot_resolve_and_gives_reasons(tiny, capsys):
    index = scan_heads(tiny)
    row = {"name": "student", "pictures": 6, **evaluate.score_embeddings(torch.randn(6, 8), index.identity, index.state, [1e-3, 0.5])}
    evaluate.print_table([row], [1e-3, 0.5])
    out = capsys.readouterr().out
    assert "15 pairs: 2 R1, 2 R2, 11 R3" in out and "*" in out and "1/11 = 0.091" in out
    alone = {"name": "student", "pictures": 2, **evaluate.score_embeddings(torch.randn(2, 8), [0, 0], [0, 0], [0.5])}
    evaluate.print_table([alone], [0.5])
    out = capsys.readouterr().out
    assert "n/a" in out and "no pairs of R2 and R3" in out


@pytest.mark.parametrize("options, message", [(["--json", "no/dir.json"], "no such folder to write"), (["--sheet", "x.foo"], "must name a .png"),
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
    table, _, kept, unreadable = evaluate.evaluate(student, None, index, np.arange(6))
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
    table, *_ = evaluate.evaluate(student, teacher, index, rows, flip_sum=True)
    assert [row["name"] for row in table] == ["teacher+mirror, aligned faces", "teacher+mirror, whole heads", "student, whole heads"]
    summed, kept, _ = evaluate.embed_rows(lambda faces: teacher(faces) + teacher(faces.flip(3)), index, rows, size=32, faces=True)
    plain, *_ = evaluate.embed_rows(teacher, index, rows, size=32, faces=True)
    assert table[0]["ordering"] == evaluate.score_embeddings(summed, index.identity[kept], index.state[kept])["ordering"]
    assert not torch.allclose(summed, 2 * plain, atol=1e-3)
    with pytest.raises(ValueError, match="--flip-sum and --colour are for a teacher"):
        save_checkpoint(str(tmp_path / "s.pt"), {"kind": "student", "model": {}, "model_args": {}, "trained": [], "teacher": None, "settings": None})
        evaluate.main(["--ckpt", str(tmp_path / "s.pt"), "--data", toy, "--flip-sum"])

"""data.py: pictures of every kind, alignment of known points, folders, split, sampler, augmentation, the toy world."""
import json
import os
import pickle
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import data
from conftest import paint, write_landmarks
from data import HeadDataset, IdentitySampler, align_face, load_picture, scan_heads
from model import preprocess_picture

FACE = data.TEMPLATE / 2 + [10, 6]  # five right points in a picture of 80 x 80


# ---------------------------------------------------------------- picture files

@pytest.mark.parametrize("kind", ["png", "tif"])
def test_16_bit_and_8_bit_copies_agree(tmp_path, kind):
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(levels.astype(np.uint8)).save(tmp_path / "8.png")
    Image.fromarray(levels * 257).save(tmp_path / f"16.{kind}")
    eight, sixteen = (np.asarray(load_picture(str(tmp_path / name))[0]) for name in ("8.png", f"16.{kind}"))
    assert np.array_equal(eight, sixteen)


def test_a_cmyk_jpeg_keeps_its_colours(tmp_path):
    Image.new("RGB", (32, 32), (200, 50, 30)).convert("CMYK").save(tmp_path / "a.jpg", quality=95)
    assert np.abs(np.asarray(load_picture(str(tmp_path / "a.jpg"))[0]).astype(int) - (200, 50, 30)).max() <= 3


@pytest.mark.parametrize("mode, expected", [("L", 100), ("1", 255), ("P", 100), ("LA", 100), ("RGBA", 100), ("PA", 100)])
def test_every_mode_becomes_rgb(mode, expected):
    grey = Image.new("L", (8, 8), 100)
    picture = grey.convert("RGB").quantize(4).convert("PA") if mode == "PA" else grey.point(lambda v: 255).convert("1") if mode == "1" else grey.convert(mode)
    assert torch.allclose(preprocess_picture(picture, 8), torch.full((3, 8, 8), expected / 127.5 - 1), atol=1e-6)


def test_transparent_pixels_become_white(tmp_path):
    Image.new("RGBA", (8, 8), (10, 20, 30, 0)).save(tmp_path / "a.png")
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([10, 20, 30] * 256)
    palette.save(tmp_path / "b.png", transparency=0)
    for name in ("a.png", "b.png"):
        assert np.asarray(load_picture(str(tmp_path / name))[0]).min() == 255


def test_black_white_and_grey_128_become_minus_1_plus_1_and_0_0039():
    for level, value in ((0, -1.0), (255, 1.0), (128, 0.0039)):
        assert preprocess_picture(Image.new("RGB", (10, 10), (level,) * 3), 8).unique().tolist() == pytest.approx([value], abs=1e-4)


@pytest.mark.parametrize("orientation, turn", [(3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_90), (8, Image.Transpose.ROTATE_270)])
def test_a_rotated_picture_with_its_exif_tag_gives_the_same_head_and_face(tmp_path, orientation, turn):
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 100, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    os.makedirs(tmp_path / "A")
    upright.save(tmp_path / "A" / "upright.png")
    upright.transpose(turn).save(tmp_path / "A" / "turned.png", exif=exif)
    write_landmarks(tmp_path, {"A/upright.png": FACE + [30, 0], "A/turned.png": FACE + [30, 0]})
    index = scan_heads(str(tmp_path))
    turned, upright = (HeadDataset(index, head_size=32, face_size=48)[row] for row in (0, 1))
    assert index.has_face.all()
    assert torch.equal(turned[1], upright[1]) and torch.equal(turned[2], upright[2])


@pytest.mark.parametrize("fault", ["empty", "half", "text", "half png"])
def test_an_unreadable_file_is_one_message_with_its_path(tmp_path, fault):
    path = tmp_path / "A" / f"x.{'png' if 'png' in fault else 'jpg'}"
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    os.makedirs(path.parent)
    noise.save(path)
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"not a picture"}.get(fault, content[:len(content) // 2]))
    with pytest.raises(ValueError, match="x.(jpg|png): not a readable picture"):
        load_picture(str(path))
    paint(f"{tmp_path}/A/y.jpg")
    dataset = HeadDataset(scan_heads(str(tmp_path)), head_size=8, face_size=8)
    batch = data.collate([dataset[0], dataset[1]])
    assert batch.row.tolist() == [1] and len(batch.unreadable) == 1 and str(path) in batch.unreadable[0]


def test_a_large_jpeg_decoded_at_reduced_scale_gives_nearly_the_same_head_and_face(tmp_path):
    y, x = np.mgrid[:1080, :1920]
    smooth = np.stack([127 + 100 * np.sin(x / 90), 127 + 100 * np.cos(y / 70), (x + y) / 12], axis=2).clip(0, 255).astype(np.uint8)
    os.makedirs(tmp_path / "A")
    Image.fromarray(smooth).save(tmp_path / "A" / "a.jpg", quality=95)
    Image.fromarray(smooth).save(tmp_path / "A" / "b.png")
    points = data.TEMPLATE * 5 + [600, 200]
    write_landmarks(tmp_path, {"A/a.jpg": points, "A/b.png": points})
    assert load_picture(str(tmp_path / "A" / "a.jpg"), short_side=100)[1] == 0.125
    jpeg, png = (HeadDataset(scan_heads(str(tmp_path)), head_size=64, face_size=56)[row] for row in (0, 1))
    for a, b in zip(jpeg[1:3], png[1:3]):
        assert (a.float() - b.float()).abs().mean() < 2


# ---------------------------------------------------------------- faces

@pytest.mark.parametrize("angle, scale", [(0, 1), (20, 2.5), (-75, 0.4)])
def test_alignment_finds_a_known_similarity_to_a_fraction_of_a_pixel(angle, scale):
    # A picture whose red and green are its own x and y: the aligned face then tells where each of its pixels came from.
    y, x = np.mgrid[:240, :240]
    picture = Image.fromarray(np.stack([x, y, 0 * x], axis=2).astype(np.uint8))
    turn = scale * np.exp(1j * np.radians(angle))
    template = data.TEMPLATE @ [1, 1j]
    there = turn * (template - template.mean()) + 120 + 120j
    face = np.asarray(align_face(picture, np.stack([there.real, there.imag], axis=1))).astype(float)
    v, u = np.mgrid[30:90, 30:90]
    expected = turn * (u + 1j * v - template.mean()) + 120 + 120j
    inside = (np.abs(expected.real - 120) < 110) & (np.abs(expected.imag - 120) < 110)
    for channel, truth in ((0, expected.real), (1, expected.imag)):  # Pillow cuts levels off instead of rounding: half a level low
        assert np.abs(face[v, u, channel] + 0.5 - truth)[inside].max() < 0.52


def test_points_at_the_template_leave_a_112_face_as_it_is():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8))
    assert np.abs(np.asarray(align_face(picture, data.TEMPLATE)).astype(int) - np.asarray(picture)).max() <= 1


def test_what_lies_outside_the_picture_is_black():
    face = np.asarray(align_face(Image.new("RGB", (80, 80), "white"), data.TEMPLATE - [60, 0]))
    assert face[40, 30].tolist() == face[100, 80].tolist() == [0, 0, 0] and face[40, 80].tolist() == [255, 255, 255]


@pytest.mark.parametrize("order, residual", [([1, 0, 2, 4, 3], 23), ([1, 0, 2, 3, 4], 20), ([0, 1, 2, 4, 3], 17)])
def test_points_in_a_wrong_order_are_an_error_with_their_residual(order, residual):
    assert data.face_transform(data.TEMPLATE[order])[2] == pytest.approx(residual, abs=1)
    with pytest.raises(ValueError, match="do not fit a face"):
        align_face(Image.new("RGB", (112, 112)), data.TEMPLATE[order])
    with pytest.raises(ValueError, match="do not fit a face"):
        align_face(Image.new("RGB", (112, 112)), data.TEMPLATE[:, ::-1])


@pytest.mark.parametrize("points", [data.TEMPLATE.T, data.TEMPLATE.ravel(), data.TEMPLATE[:4], np.full((5, 2), np.nan)])
def test_points_of_another_shape_or_nan_are_an_error_that_shows_the_shape(points):
    with pytest.raises(ValueError, match=r"shape \(5, 2\); got shape"):
        align_face(Image.new("RGB", (112, 112)), points)


@pytest.mark.parametrize("many", [data.MANY, 0])  # headers are read by this process, or by several
def test_landmarks_that_fit_no_face_count_as_no_face_with_a_note(tmp_path, monkeypatch, many):
    monkeypatch.setattr(data, "MANY", many)
    rows = {"right": FACE, "equal": np.full((5, 2), 30.0), "outside": FACE + 500, "swapped": FACE[[1, 0, 2, 4, 3]], "nan": np.full((5, 2), np.nan)}
    for name in [*rows, "rear"]:
        paint(f"{tmp_path}/A/{name}.png", size=(80, 80))
    write_landmarks(tmp_path, {f"A/{name}.png": points for name, points in rows.items()} | {"A/gone.png": FACE})
    index = scan_heads(str(tmp_path))
    assert {index.path(row) for row in np.flatnonzero(index.has_face)} == {"A/right.png"}
    assert "faces: 1 of 6 pictures" in index.summary()
    assert len(index.notes) == 4 and any("gone.png" in line for line in index.notes)
    write_landmarks(tmp_path, {"A/right.png": FACE / 80})  # in shares of the side instead of pixels
    assert not scan_heads(str(tmp_path)).has_face.any()
    batch = data.collate([HeadDataset(index, head_size=8, face_size=8)[row] for row in range(6)])
    assert batch.has_face.sum() == 1 and batch.face[~batch.has_face].max() == 0


@pytest.mark.parametrize("text, message", [("path,x1,x2\nA/a.jpg,1,2\n", "first line must be path,x1,y1"), ("", "found nothing"),
                                           (",".join(data.LANDMARK_HEADER) + "\nA/a.jpg,1,2,3,4,5,6,7,8\n", r"line 2: .*shape \(5, 2\)"),
                                           (",".join(data.LANDMARK_HEADER) + "\nA/a.jpg,1,2,3,4,5,6,7,8,9,ten\n", "line 2")])
def test_a_malformed_landmark_file_is_an_error_with_its_line(tmp_path, text, message):
    paint(f"{tmp_path}/A/a.jpg")
    (tmp_path / "landmarks.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        scan_heads(str(tmp_path))


def test_turned_faces_and_repeated_rows_are_used_with_a_notice(tmp_path):
    for name in "ab":
        paint(f"{tmp_path}/A/{name}.png", size=(80, 80))
    rows = [["A/a.png", *FACE[[4, 3, 2, 1, 0]].ravel()], ["A/b.png", *FACE.ravel()], ["A/b.png", *FACE.ravel()]]
    data.write_csv(tmp_path / "landmarks.csv", data.LANDMARK_HEADER, rows)
    index = scan_heads(str(tmp_path))
    assert index.has_face.all() and len(index.notes) == 2
    assert "1 faces turned by more than 60 degrees" in index.notes[0] and "1 pictures with several landmark rows" in index.notes[1]


def test_names_that_are_equal_once_composed_and_odd_exif_tags_do_not_stop_the_scan(tmp_path):
    for name in ("\u00e9.png", "e\u0301.png"):
        paint(f"{tmp_path}/A/{name}", size=(80, 80))
    text = b"Exif\0\0II*\0" + struct.pack("<IHHHI4sI", 8, 1, 0x0112, 2, 2, b"6", 0)  # an orientation that is text
    Image.new("RGB", (80, 80)).save(tmp_path / "A" / "odd.png", exif=text)
    write_landmarks(tmp_path, {"A/\u00e9.png": FACE, "A/odd.png": FACE})
    index = scan_heads(str(tmp_path))
    assert index.has_face.sum() == 2 and not any(isinstance(HeadDataset(index, head_size=8, face_size=8)[row], str) for row in range(3))


def test_links_in_circles_and_pipes_are_no_pictures_that_stop_or_hang_the_scan(tmp_path):
    paint(f"{tmp_path}/A/a.png")
    os.symlink("b.png", tmp_path / "A" / "b.png")
    os.mkfifo(tmp_path / "A" / "c.png")
    index = scan_heads(str(tmp_path))
    assert [index.path(row) for row in range(len(index.paths))] == ["A/a.png", "A/b.png"]
    assert "b.png: not a readable picture" in HeadDataset(index, head_size=8, face_size=0)[1]


def test_a_faces_folder_stands_in_for_landmarks(tmp_path):
    for name in ("a", "b"):
        paint(f"{tmp_path}/heads/A/{name}.png")
    paint(f"{tmp_path}/faces/A/a.png", colour=(1, 2, 3))
    index = scan_heads(str(tmp_path / "heads"), faces=str(tmp_path / "faces"))
    _, _, face, has_face, *_ = HeadDataset(index, head_size=8, face_size=8)[0]
    assert index.has_face.tolist() == [True, False] and has_face and face[:, 0, 0].tolist() == [1, 2, 3]


# ---------------------------------------------------------------- folders

def test_system_files_are_ignored_and_every_extension_is_found_once(tmp_path):
    for name in ("a.JPG", "b.Jpeg", "c.PNG", "d.webp", "e.bmp"):
        paint(f"{tmp_path}/A/s/{name}")
    for name in (".DS_Store", "A/._a.JPG", "A/s/Thumbs.db", "A/s/._c.PNG", "A/.ipynb_checkpoints/x.jpg", "__MACOSX/A/s/a.jpg", "A/s/notes.txt"):
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    index = scan_heads(str(tmp_path))
    assert index.summary().startswith(f"{tmp_path}: 1 identities, 1 appearance states, 5 pictures") and not index.notes


def test_states_are_segments_and_pictures_without_a_segment_are_states_of_their_own(tmp_path):
    for name in ("A/s0/0.jpg", "A/s0/1.jpg", "A/s1/0.jpg", "B/0.jpg", "B/1.jpg"):
        paint(f"{tmp_path}/{name}")
    index = scan_heads(str(tmp_path))
    assert index.names == ["A", "B"] and index.identity.tolist() == [0, 0, 0, 1, 1]
    assert sorted(np.unique(index.state, return_counts=True)[1].tolist()) == [1, 1, 1, 2]


def test_empty_folders_are_skipped_and_counted(tmp_path):
    paint(f"{tmp_path}/A/s0/0.jpg")
    os.makedirs(tmp_path / "A" / "empty")
    os.makedirs(tmp_path / "nobody")
    index = scan_heads(str(tmp_path))
    assert len(index.names) == 1 and index.notes == ["skipped: 2 empty folders (first: A/empty)"]


def test_a_root_that_holds_no_heads_is_one_line_with_the_layout_and_what_was_found(tmp_path):
    with pytest.raises(ValueError, match="no such folder; expected a folder laid out as PATH/<identity>/<segment>"):
        scan_heads(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="found 0 pictures directly"):
        scan_heads(str(tmp_path))
    paint(f"{tmp_path}/loose.jpg")
    with pytest.raises(ValueError, match="a file; expected a folder"):
        scan_heads(str(tmp_path / "loose.jpg"))
    with pytest.raises(ValueError, match="found 1 pictures directly in the folder, 0 folders in it"):
        scan_heads(str(tmp_path))
    paint(f"{tmp_path}/a/b/c/d.jpg")
    with pytest.raises(ValueError, match="1 folders below the segments"):
        scan_heads(str(tmp_path))


def test_names_in_any_script_are_kept_and_landmarks_find_them(tmp_path):
    names = ["Zoë", "李雷", "two words"]
    for name in names:
        paint(f"{tmp_path}/{name}/a.png", size=(80, 80))
    write_landmarks(tmp_path, {f"{name}/a.png": FACE for name in ("Zoe\u0308", "李雷", "two words")})  # Zoë, as macOS spells it
    index = scan_heads(str(tmp_path))
    assert sorted(index.names) == sorted(names) and index.has_face.all()


def test_segment_frames_cut_numbered_frames_into_windows(tmp_path):
    for number in range(36):
        paint(f"{tmp_path}/A/{number:03d}.png", size=(4, 4))
    blocks = scan_heads(str(tmp_path), segment_frames=18)
    assert [len(set(blocks.state[part])) for part in (slice(0, 18), slice(18, 36), slice(0, 36))] == [1, 1, 2]
    gap = scan_heads(str(tmp_path), segment_frames=10, segment_gap=5)  # 0..9, 15..24, 30..35
    assert [gap.path(row)[2:5] for row in range(len(gap.paths))] == [f"{n:03d}" for n in range(36) if n % 15 < 10]
    assert gap.notes == ["skipped: 10 frames in the gaps between segments (first: A/010.png)"]


def test_segment_frames_count_from_1_where_no_frame_is_numbered_0(tmp_path):
    for number in (1, 18, 19, 36):
        paint(f"{tmp_path}/A/{number}.png", size=(4, 4))
    index = scan_heads(str(tmp_path), segment_frames=18)
    state = {index.path(row)[2:-4]: index.state[row] for row in range(4)}
    assert state["1"] == state["18"] != state["19"] == state["36"]
    paint(f"{tmp_path}/A/portrait.png")
    with pytest.raises(ValueError, match="portrait.png: --segment-frames needs frame numbers"):
        scan_heads(str(tmp_path), segment_frames=18)


def test_an_index_holds_one_number_or_one_byte_string_a_picture_in_arrays_and_nothing_else(toy):
    index = scan_heads(toy)
    a_picture = {name: value for name, value in vars(index).items() if name not in ("root", "faces", "names", "notes")}
    assert all(isinstance(value, np.ndarray) and not value.dtype.hasobject and len(value) == len(index.paths) for value in a_picture.values())
    sampler = IdentitySampler(np.arange(len(index.paths)), index.identity, index.state, P=2, S=2, K=2)
    assert not any(isinstance(value, (list, dict)) and len(value) for name, value in vars(sampler).items() if name != "notices")


# ---------------------------------------------------------------- split and sampler

def test_the_split_is_by_a_hash_of_the_name_so_that_a_new_person_moves_nobody():
    names = [f"person {i}" for i in range(200)]
    out = data.split_identities(names)
    assert 30 < out.sum() < 70
    assert data.split_identities(names + ["new"])[:200].tolist() == out.tolist()
    assert data.split_identities(names[::-1])[::-1].tolist() == out.tolist()


def test_of_a_few_identities_two_are_held_out_two_trained_on_and_of_three_none_held_out():
    assert data.split_identities([f"person_0{i}" for i in range(3, 8)]).tolist() == [False, False, False, True, True]
    for name in range(50):
        names = [f"{name}{letter}" for letter in "abcde"]
        assert data.split_identities(names).sum() in (2, 3) and data.split_identities(names, held_out=1.0).sum() == 3
        assert data.split_identities(names[:3], held_out=0.9).sum() == 0


def world(states, frames, people=10):
    """rows, identity and state arrays of a regular world."""
    n = people * states * frames
    return np.arange(n), np.arange(n) // (states * frames), np.arange(n) // frames


def test_a_batch_is_p_distinct_identities_with_s_states_of_k_different_frames():
    rows, identity, state = world(4, 6)
    sampler = IdentitySampler(rows, identity, state, P=4, S=3, K=2)
    assert len(sampler) == len(list(sampler)) == 10 * 24 // 24 and not sampler.notices
    for batch in sampler:
        assert len(set(batch)) == 24
        people, counts = np.unique(identity[batch], return_counts=True)
        assert len(people) == 4 and set(counts) == {6}
        assert all(len(set(state[batch][identity[batch] == person])) == 3 for person in people)


def test_epochs_have_equal_length_differ_repeat_exactly_and_show_every_picture():
    rows, identity, state = world(3, 5, people=7)
    sampler, seen, lengths, epochs = IdentitySampler(rows, identity, state, P=3, S=2, K=2, seed=5), set(), [], []
    for epoch in range(40):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        lengths.append(len(epochs[-1]))
        seen |= {row for batch in epochs[-1] for row in batch}
    assert set(lengths) == {len(sampler)} and seen == set(rows.tolist()) and epochs[0] != epochs[1]
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


def test_few_identities_and_few_frames_work_with_a_notice():
    identity, state = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 2])
    sampler = IdentitySampler(np.arange(4), identity, state, P=8, S=2, K=2)
    batch = next(iter(sampler))
    assert len(sampler) == 1 and sorted(batch) == [0, 1, 2, 3]
    assert len(sampler.notices) == 2 and "only 2 training identities" in sampler.notices[0] and "2 training identities have fewer" in sampler.notices[1]


def test_an_identity_with_fewer_states_gives_more_frames_of_those_it_has():
    rows, identity, state = world(1, 9, people=2)
    for batch in IdentitySampler(rows, identity, state, P=2, S=4, K=2):
        assert len(set(batch)) == 16


# ---------------------------------------------------------------- dataset and augmentation

def test_the_dataset_survives_pickling_as_a_spawned_worker_needs(toy):
    dataset = HeadDataset(scan_heads(toy), head_size=24, face_size=16)
    again = pickle.loads(pickle.dumps(dataset))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(dataset[5], again[5]))


def test_workers_and_the_main_process_read_the_same_batches(toy):
    dataset = HeadDataset(scan_heads(toy), head_size=24, face_size=16)
    here, there = (list(data.loader(dataset, [[0, 7], [9]], workers)) for workers in (0, 1))
    assert all(torch.equal(a.head, b.head) and torch.equal(a.face, b.face) for a, b in zip(here, there))


def test_cover_hides_the_middle_of_its_share_of_the_pictures_and_nothing_else():
    torch.manual_seed(0)
    heads, covered = data.cover_faces(torch.zeros(400, 3, 32, 32), 0.25)
    hidden = (heads != 0).all(dim=1)
    assert 0.18 < covered.float().mean() < 0.32 and torch.equal(hidden[:, 14, 15], covered)
    assert not hidden[:, :, 0].any() and not hidden[:, 31].any() and not hidden[~covered].any()
    assert not data.cover_faces(torch.zeros(9, 3, 32, 32), 0.0)[1].any()


def test_augmentation_moves_and_lights_but_keeps_hue_and_range():
    torch.manual_seed(0)
    orange = torch.tensor([0.6, 0.2, -0.4]).view(1, 3, 1, 1).expand(64, 3, 32, 32)
    centre = data.augment(orange)[:, :, 16, 16]
    assert centre.abs().max() <= 1 and centre[:, 0].std() > 0.02
    differences = (centre[:, 0] - centre[:, 1]) / (centre[:, 1] - centre[:, 2])  # hue: the ratio of channel differences
    inside = centre.abs().max(dim=1).values < 1
    assert inside.sum() > 40 and torch.allclose(differences[inside], torch.tensor(0.4 / 0.6), atol=1e-3)


def test_augmentation_without_strength_only_flips():
    heads = torch.rand(16, 3, 20, 20) * 2 - 1
    same = data.augment(heads, degrees=0, zoom=0, shift=0, light=0)
    kept = [torch.allclose(a, b, atol=1e-5) for a, b in zip(same, heads)]
    flipped = [torch.allclose(a, b.flip(2), atol=1e-5) for a, b in zip(same, heads)]
    assert all(k or f for k, f in zip(kept, flipped)) and any(kept) and any(flipped)


# ---------------------------------------------------------------- the toy world

def files(root):
    return {os.path.relpath(os.path.join(folder, name), root): open(os.path.join(folder, name), "rb").read() for folder, _, names in os.walk(root) for name in names}


def test_the_toy_world_is_the_same_for_a_seed_and_more_people_change_nobody(toy, tmp_path):
    data.make_toy(str(tmp_path / "few"), people=3, looks=3, frames=4)
    data.make_toy(str(tmp_path / "other"), people=1, looks=1, frames=1, seed=1)
    few, many = files(tmp_path / "few"), files(toy)
    pictures = [name for name in few if name.endswith(".jpg")]
    assert len(pictures) == 36 and all(few[name] == many[name] for name in pictures)
    assert few["person_0000/look_0/000.jpg"] != files(tmp_path / "other")["person_0000/look_0/000.jpg"]


def test_toy_landmarks_lie_on_the_drawn_pupils():
    rng = np.random.default_rng(0)
    head = {**data.draw_from(data.PERSON, rng), **data.draw_from(data.LOOK, rng), **data.draw_from(data.FRAME, rng)}
    head |= dict(glasses=0, eye_size=0.18, skin=1.0, light=1.0, side_light=0.0, noise=0.0, hair_style=0, hat=0, mole=0.01)
    picture, points = data.draw_head(head | dict(rear=0.0), size=256)
    pixels = np.asarray(picture).astype(int).sum(axis=2)
    for x, y in points[:2]:
        assert pixels[round(y), round(x)] < 60
    assert data.face_transform(points)[2] < data.MAX_RESIDUAL
    assert data.draw_head(head | dict(rear=0.99), size=64)[1] is None


def test_a_share_of_the_toy_frames_are_rear_views_without_a_face(toy):
    index = scan_heads(toy)
    rows = dict(line.split(",", 1) for line in open(os.path.join(toy, "attributes.csv")).read().splitlines())
    rear = np.array([rows[index.path(row)].endswith(",1") for row in range(len(index.paths))])
    assert rows["path"].endswith(",rear") and np.array_equal(rear, ~index.has_face) and 0 < rear.mean() < 0.1


def test_a_varied_attribute_is_drawn_anew_in_every_frame_and_the_rest_stays_the_persons(tmp_path, monkeypatch):
    heads = []
    monkeypatch.setattr(data, "draw_head", lambda head, size: heads.append(head) or (Image.new("RGB", (8, 8)), None))
    for vary in (None, "skin"):
        data.draw_person((str(tmp_path / str(vary)), 3, 2, 4, 64, 0, vary))
    plain, varied = heads[:8], heads[8:]
    assert len({head["skin"] for head in plain}) == 1 and len({head["skin"] for head in varied}) == 8
    assert all({**head, "skin": 0} == {**other, "skin": 0} for head, other in zip(plain, varied)) and all(0.2 <= head["skin"] <= 0.8 for head in varied)


def test_one_attribute_moves_at_a_time_and_the_rest_of_the_head_rests():
    moved = data.move_person((0, 2, ["light", "hat_hue"], [32], [24], 64))
    assert set(moved) == {"still", "light", "hat_hue"} and moved["light"]["head", 32].shape == (3, 2, 3, 32, 32) and moved["still"]["face", 24].shape == (2, 3, 24, 24)
    means = moved["light"]["head", 32].reshape(3, 2, -1).mean(axis=2)
    assert (np.diff(means, axis=0) > 0).all()
    bottom = moved["hat_hue"]["head", 32][:, :, :, 24:]
    assert np.array_equal(bottom[0], bottom[1]) and not np.array_equal(moved["hat_hue"]["head", 32][0], moved["hat_hue"]["head", 32][1])
    again = data.move_person((0, 2, ["light", "hat_hue"], [32], [24], 64))
    assert all(np.array_equal(pixels, again[name][view]) for name, views in moved.items() for view, pixels in views.items())


def test_a_toy_world_is_known_by_its_attributes(toy, tiny):
    assert data.is_toy(toy) and not data.is_toy(tiny)


def test_a_toy_world_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "write_csv", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.make_toy(str(tmp_path / "toy") + "/", people=1, looks=1, frames=1)
    assert not os.listdir(tmp_path)


def test_the_toy_world_never_overwrites_a_folder(tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        data.make_toy(str(tmp_path))


# ---------------------------------------------------------------- the report

def test_the_report_on_tiny_counts_its_pairs_and_names_unreadable_pictures(tiny, tmp_path, capsys):
    (tmp_path / "tiny" / "C" / "s0" / "broken.jpg").write_bytes(b"")
    data.main(["--data", tiny, "--json", str(tmp_path / "report.json")])
    out = capsys.readouterr().out
    assert "3 identities, 4 appearance states, 7 pictures" in out and "unreadable pictures: 1" in out and "broken.jpg" in out
    assert "2 R1 (same look), 2 R2 (same person, other look), 11 R3 (other people)" in out


def test_names_in_any_script_work_in_the_c_locale_and_a_missing_folder_is_one_line(tmp_path):
    paint(f"{tmp_path}/李雷/Zoë 1/a b.jpg")
    script = [sys.executable, os.path.join(os.path.dirname(data.__file__), "data.py"), "--data"]
    done = subprocess.run([*script, str(tmp_path)], env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "1 identities, 1 appearance states, 1 pictures" in done.stdout
    done = subprocess.run([*script, "nowhere"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("data.py: nowhere: no such folder") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("text, message", [("0/a.jpg,1\n", "must be path and then"), ("path\n", "must be path"), ("path,a,a\n", "each once"), ("", "must be path"),
                                           ("path,a\nA/s0/0.jpg,1,1\n", "line 2: expected a path and 1 values, found 2"), ('path,a\n"A' + "x" * 140000, "not to be read")])
def test_an_attributes_file_that_is_none_is_refused(tiny, text, message):
    with open(os.path.join(tiny, "attributes.csv"), "w", encoding="utf-8") as file:
        file.write(text)
    with pytest.raises(ValueError, match=message):
        data.read_attributes(scan_heads(tiny))


def test_attributes_are_read_in_all_usual_spellings(tiny):
    with open(os.path.join(tiny, "attributes.csv"), "w", encoding="utf-8-sig", newline="") as file:
        file.write("path,a,b\r\nA/s0/0.jpg,1.0,-1\r\nA/s0/1.jpg, 0 ,1\r\n./B/s0/0.jpg,,0\r\n")
    values, messages = data.read_attributes(scan_heads(tiny))
    assert messages == [] and np.array_equal(values["a"], [1, 0] + [np.nan] * 4, equal_nan=True)
    assert np.array_equal(values["b"], [0, 1, np.nan, 0, np.nan, np.nan], equal_nan=True)


def sixteen_bit_tiff(path, levels, endian, photometric=1):
    """Write grey levels (H, W) as an uncompressed 16-bit TIFF; photometric 0: white is zero."""
    pixels, (height, width) = levels.astype(endian + "u2").tobytes(), levels.shape
    tags = [(256, 3, width), (257, 3, height), (258, 3, 16), (259, 3, 1), (262, 3, photometric), (273, 4, 8 + 2 + 9 * 12 + 4), (277, 3, 1), (278, 3, height), (279, 4, len(pixels))]
    entries = b"".join(struct.pack(endian + "HHI" + ("HH" if kind == 3 else "I"), tag, kind, 1, *([value, 0] if kind == 3 else [value])) for tag, kind, value in tags)
    path.write_bytes({"<": b"II*\0", ">": b"MM\0*"}[endian] + struct.pack(endian + "IH", 8, len(tags)) + entries + bytes(4) + pixels)


@pytest.mark.parametrize("endian, photometric", [("<", 1), (">", 1), ("<", 0)])
def test_16_bit_tiffs_of_either_byte_order_and_with_white_as_zero_agree_with_8_bits(tmp_path, endian, photometric):
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    sixteen_bit_tiff(tmp_path / "a.tif", levels * 257 if photometric else 65535 - levels * 257, endian, photometric)
    assert np.array_equal(np.asarray(load_picture(str(tmp_path / "a.tif"))[0])[:, :, 0], levels)


@pytest.mark.parametrize("kind", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation, turn", [(3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_90), (8, Image.Transpose.ROTATE_270)])
def test_a_turned_picture_of_every_kind_keeps_its_face_where_its_upright_width_has_it(tmp_path, kind, orientation, turn):
    upright, exif, save = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 400, 3), dtype=np.uint8)), Image.Exif(), {"lossless": True} if kind == "webp" else {}
    exif[0x0112] = orientation
    os.makedirs(tmp_path / "A")
    upright.save(tmp_path / "A" / f"upright.{kind}", **save)
    upright.transpose(turn).save(tmp_path / "A" / f"turned.{kind}", exif=exif, **save)
    write_landmarks(tmp_path, {f"A/{name}.{kind}": FACE + [310, 0] for name in ("upright", "turned")})  # outside, were width and height exchanged
    index = scan_heads(str(tmp_path))
    turned, upright = (HeadDataset(index, head_size=32, face_size=48)[row] for row in (0, 1))
    assert index.has_face.all() and data.upright_size(str(tmp_path / "A" / f"turned.{kind}")) == (400, 80)
    assert torch.equal(turned[1], upright[1]) and torch.equal(turned[2], upright[2])


def test_landmarks_as_x1_to_x5_then_y1_to_y5_never_make_a_crop(tmp_path):
    points = FACE.T.reshape(5, 2)
    with pytest.raises(ValueError, match="do not fit a face"):
        align_face(Image.new("RGB", (80, 80)), points)
    paint(f"{tmp_path}/A/a.png", size=(80, 80))
    write_landmarks(tmp_path, {"A/a.png": points})
    index = scan_heads(str(tmp_path))
    assert not index.has_face.any() and index.notes == ["no face: 1 pictures whose landmarks fit no face (wrong order? not in pixels?) (first: A/a.png)"]
    (tmp_path / "landmarks.csv").write_text("path," + ",".join(f"{axis}{i}" for axis in "xy" for i in range(1, 6)) + "\n")
    with pytest.raises(ValueError, match="first line must be path,x1,y1"):
        scan_heads(str(tmp_path))


def test_system_folders_are_ignored_at_every_level(tmp_path):
    paint(f"{tmp_path}/A/s/a.jpg")
    for folder in ("", "A/", "A/s/"):
        for name in (".DS_Store", ".ipynb_checkpoints", "__MACOSX", ".Trashes"):
            paint(f"{tmp_path}/{folder}{name}/x.jpg")
        for name in ("._x.jpg", "Thumbs.db", "desktop.ini"):
            (tmp_path / folder / name).write_bytes(b"x")
    index = scan_heads(str(tmp_path))
    assert index.summary().startswith(f"{tmp_path}: 1 identities, 1 appearance states, 1 pictures") and not index.notes


def test_landmarks_and_the_report_are_utf_8_in_the_c_locale(tmp_path):
    root, report = tmp_path / "Köpfe 李", tmp_path / "Bericht ë.json"
    paint(f"{root}/李雷/Zoë 1/a b.png", size=(80, 80))
    write_landmarks(root, {"李雷/Zoë 1/a b.png": FACE})
    script = [sys.executable, os.path.join(os.path.dirname(data.__file__), "data.py"), "--data", str(root), "--json", str(report)]
    done = subprocess.run(script, env={**os.environ, "LC_ALL": "C"}, capture_output=True, timeout=60)
    assert done.returncode == 0 and not done.stderr and b"faces: 1 of 1 pictures" in done.stdout
    assert json.loads(report.read_bytes().decode("utf-8"))["data"] == str(root)


def test_the_report_never_replaces_a_table_of_its_folder(tiny):
    write_landmarks(tiny, {"A/s0/0.jpg": FACE})
    before = open(f"{tiny}/landmarks.csv", "rb").read()
    for file in ("landmarks.csv", "A/s0/0.jpg"):
        with pytest.raises(ValueError, match="over an input"):
            data.main(["--data", tiny, "--json", f"{tiny}/{file}"])
    assert open(f"{tiny}/landmarks.csv", "rb").read() == before


@pytest.mark.parametrize("options", [["--segment-frames", "9" * 20], ["--segment-frames", "3", "--segment-gap", "9" * 20]])
def test_windows_longer_than_any_number_are_one_message(toy, options):
    with pytest.raises(ValueError, match="must be 0 to 1e18 together"):
        data.main(["--data", toy, *options])


def test_the_transparent_grey_of_a_16_bit_picture_is_white(tmp_path):
    levels = np.array([[1000, 30000], [1001, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "a.png", transparency=1000)
    assert np.asarray(load_picture(str(tmp_path / "a.png"))[0])[:, :, 0].tolist() == [[255, 117], [3, 255]]


@pytest.mark.parametrize("send", [os.kill, os.killpg])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_toy_world_is_drawn_leaves_nothing_half_done(tmp_path, number, send):
    script = [sys.executable, os.path.join(os.path.dirname(data.__file__), "data.py"), "--toy", str(tmp_path / "toy"), "--people", "3000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would what it starts
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as drawing:
        signal.signal(signal.SIGINT, before)
        assert drawing.stdout.readline().startswith("toy world: 150 of 3000")
        send(drawing.pid, number)
        _, error = drawing.communicate()
    assert drawing.returncode == 128 + number and not os.listdir(tmp_path) and error == ("interrupted\n" if number == signal.SIGINT else "")


def test_a_face_is_the_same_from_a_reduced_decode_of_any_size(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 51, 3), dtype=np.uint8))
    points, faces = data.TEMPLATE * 4.1 + [1500, 1100], []
    for width, height in ((2000, 1600), (2001, 1601)):
        folder = tmp_path / str(width)
        os.makedirs(folder / "A")
        noise.resize((2040, 1640), Image.Resampling.BICUBIC).crop((0, 0, width, height)).save(folder / "A" / "a.jpg", quality=95)
        write_landmarks(folder, {"A/a.jpg": points})
        faces.append(HeadDataset(scan_heads(str(folder)), head_size=0, face_size=112)[0][2].float())
    assert (faces[0] - faces[1]).abs().mean() < 1.5  # grey levels; 6 and more where the crop is shifted by half a pixel


def test_a_report_that_cannot_be_written_is_heard_of_before_the_toy_world_is_drawn(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder to write it to"):
        data.main(["--toy", str(tmp_path / "toy"), "--people", "4", "--json", str(tmp_path / "nowhere" / "report.json")])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("raises", [lambda: np.empty(2 ** 60, np.uint8), lambda: torch.empty(2 ** 60, dtype=torch.uint8), torch.OutOfMemoryError("CUDA out of memory."),
                                    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), RuntimeError("Caught another in DataLoader worker process 0.")])
def test_out_of_memory_is_one_line_and_no_other_runtime_error_is(raises, monkeypatch, capsys):
    def main():
        if isinstance(raises, Exception):
            raise raises
        raises()

    before = signal.getsignal(signal.SIGTERM)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "reconfigure", lambda **_: None, raising=False)
    with pytest.raises(RuntimeError if "another" in str(raises) else SystemExit) as ended:
        data.command_line(main)
    signal.signal(signal.SIGTERM, before)
    error = capsys.readouterr().err
    assert not error if "another" in str(raises) else ended.value.code == 2 and error.count("\n") == 1 and "out of memory: smaller batches" in error


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_idle_processes_of_a_pool_end_with_the_main_process(number, status):
    script = """
import os, sys, time, data
def main():
    with data.processes() as pool:
        print(*set(pool.map(pid, range(99), 1)), flush=True)
        time.sleep(60)
def pid(_):
    time.sleep(0.01)
    return os.getpid()
data.command_line(main)
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                          env={**os.environ, "PYTHONPATH": os.path.dirname(data.__file__)}) as run:
        signal.signal(signal.SIGINT, before)
        workers = [int(pid) for pid in run.stdout.readline().split()]
        os.killpg(run.pid, number)
        assert run.wait(timeout=20) == status and len(workers) == os.cpu_count()  # the end of the pipes waits for the workers
        assert run.stdout.read() == "" and run.stderr.read() == ("interrupted\n" if number == signal.SIGINT else "")

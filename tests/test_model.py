"""model.py: released names and sizes, the tokens and designs, and checkpoint files that load strictly or not at all."""
import json
import math
import os

import pytest
import torch
from PIL import Image

import released
from model import (Attention, BatchNorm, HeadSimilarity, TransReID, VisionTransformer, jigsaw, load_model, new_student, read_checkpoint,
                   read_weights, resize_pos_embed, save_checkpoint, unit_rows)

SMALL = dict(image_size=32, patch_size=8, dim=32, depth=2, heads=4)


def student(**options):
    torch.manual_seed(0)
    return HeadSimilarity(**SMALL, **options)


def heads(n, seed=0):
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def save_student(path, model, tensors=None):
    save_checkpoint(path, {"kind": "student", "trained": [], "model_args": dict(design=model.design, **SMALL), "model": tensors or model.state_dict()})


def test_the_trunk_has_the_released_names_shapes_and_numbers():
    with torch.device("meta"):
        tensors = VisionTransformer().state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert len(shapes) == 269 and sum(math.prod(shape) for shape in shapes.values()) == 63_225_344
    for name, shape in {"pos_embed": [1, 196, 512], "patch_embed.proj.weight": [512, 3, 8, 8], "patch_embed.proj.bias": [512],
                        "blocks.23.attn.qkv.weight": [1536, 512], "blocks.0.attn.proj.bias": [512], "blocks.0.norm2.weight": [512],
                        "blocks.11.mlp.fc1.weight": [1536, 512], "blocks.11.mlp.fc2.bias": [512], "norm.bias": [512]}.items():
        assert shapes[name] == shape
    assert "blocks.0.attn.qkv.bias" not in shapes


def test_the_student_adds_two_cls_tokens_and_the_released_projections():
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in HeadSimilarity().state_dict().items()}
    assert len(shapes) == 306 - 12  # the released file without the unused feature head
    assert shapes["cls_token"] == [1, 2, 512] and shapes["feature_cls.2.weight"] == shapes["head_feature.3.weight"] == [512, 512]
    assert shapes["feature_cls.3.running_var"] == shapes["head_feature.4.running_var"] == [512] and "feature_cls.0.bias" not in shapes


def test_attention_is_the_explicit_softmax():
    torch.manual_seed(0)
    attention, x = Attention(16, 4), torch.randn(2, 5, 16)
    q, k, v = (part.view(2, 5, 4, 4).transpose(1, 2) for part in attention.qkv(x).split(16, dim=2))
    weights = torch.softmax(q @ k.transpose(2, 3) * 4 ** -0.5, dim=-1)
    assert torch.allclose(attention(x), attention.proj((weights @ v).transpose(1, 2).reshape(2, 5, 16)), atol=1e-6)


def test_cls_tokens_stand_first_and_only_patches_have_positions():
    model = VisionTransformer(num_cls=2, **SMALL).eval()
    with torch.no_grad():
        model.pos_embed.zero_()
        tokens = model(heads(1))
        shuffled = model(heads(1).roll(8, dims=3))  # patches change places; without positions only their order changes
    assert tokens.shape == (1, 2 + 16, 32) and model.pos_embed.shape == (1, 16, 32)
    assert torch.allclose(tokens[:, :2], shuffled[:, :2], atol=1e-5) and not torch.allclose(tokens[:, 2:], shuffled[:, 2:], atol=1e-5)


def test_each_design_reads_the_tokens_it_says():
    dual_cls, dual_head, shared = (student(design=design).eval() for design in ("dual-cls", "dual-head", "shared"))
    assert (dual_cls.num_cls, dual_head.num_cls, shared.num_cls) == (2, 1, 1)
    z = shared(heads(3))
    assert z.z_id is z.z_head and not hasattr(shared, "head_feature")
    tokens = dual_cls.tokens(heads(3))
    assert torch.equal(dual_cls(heads(3)).z_id, dual_cls.feature_cls(tokens[:, 0]))
    assert torch.equal(dual_cls(heads(3)).z_head, dual_cls.head_feature(tokens[:, 1]))
    assert torch.equal(dual_head(heads(3)).z_head, dual_head.head_feature(dual_head.tokens(heads(3))[:, 0]))


def test_jigsaw_rotates_by_four_and_deals_the_tokens_into_two_rows():
    order = lambda n: jigsaw(torch.arange(n).view(1, n, 1)).flatten().tolist()
    assert order(8) == [4, 0, 5, 1, 6, 2, 7, 3]
    assert order(10) == [4, 9, 5, 0, 6, 1, 7, 2, 8, 3]
    assert order(9) == [4, 0, 5, 1, 6, 2, 7, 3, 8, 2]  # rotated to 4 5 6 7 8 0 1 2 3; the last but one, 2, stands twice


@pytest.mark.parametrize("sizes", [{}, dict(image_size=33, patch_stride=5)])  # 16 patches, and 36 that overlap
def test_transreid_reads_one_global_and_four_local_features_from_copies_of_the_last_block(sizes):
    torch.manual_seed(0)
    trunk, model = VisionTransformer(num_cls=1, **{**SMALL, **sizes}), TransReID(classes=3, **{**SMALL, **sizes}).eval()
    model.load_state_dict({**model.state_dict(), **model.adopt(trunk.state_dict())})
    side = trunk.image_size
    pictures = torch.rand(2, 3, side, side) * 2 - 1
    with torch.no_grad():
        patches = torch.nn.functional.conv2d(pictures, trunk.patch_embed.proj.weight, trunk.patch_embed.proj.bias,
                                             stride=sizes.get("patch_stride", 8)).flatten(2).transpose(1, 2)
        x = trunk.blocks[0](torch.cat([trunk.cls_token.expand(2, 1, 32), patches + trunk.pos_embed], dim=1))
        last = lambda tokens: trunk.norm(trunk.blocks[1](tokens))[:, 0]
        n, quarter, expected = patches.shape[1], patches.shape[1] // 4, [last(x)]
        rotated = [1 + (i + 4) % n for i in range(n)]
        dealt = [rotated[i // 2 + (i % 2) * (n // 2)] for i in range(n)]
        expected += [last(x[:, [0, *dealt[part * quarter:(part + 1) * quarter]]]) for part in range(4)]
        z_id, z_head = model(pictures)
        assert torch.allclose(model.features(pictures), torch.stack(expected, dim=1), atol=1e-5)
        assert torch.allclose(z_id, torch.cat([expected[0], *(local / 4 for local in expected[1:])], dim=1), atol=1e-5)
        assert torch.equal(z_id, z_head) and model.embed(pictures).shape == (2, 160)


def test_transreid_trains_every_parameter_and_its_branches_part():
    torch.manual_seed(0)
    model = TransReID(classes=3, **SMALL)
    logits = model.logits(model.features(heads(6)))
    assert logits.shape == (6, 5, 3) and not any(name.startswith(("blocks.1.", "norm.")) for name in model.state_dict())
    assert model.classifier.std().item() == pytest.approx(0.001, rel=0.2) and model.neck.bias is None
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.arange(30) % 3).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    branches = [[p.grad for p in branch.parameters()] for branch in (model.global_branch, model.local_branch)]
    assert not any(torch.equal(a, b) for a, b in zip(*branches))


def test_overlapping_patches_make_a_larger_grid_that_positions_are_resized_to():
    assert VisionTransformer(**{**SMALL, "image_size": 32}, patch_stride=6).pos_embed.shape == (1, 25, 32)  # (32 - 8) / 6 + 1 = 5
    assert VisionTransformer(**{**SMALL, "image_size": 33}, patch_stride=8).pos_embed.shape == (1, 16, 32)  # what is left over is cut


def test_embed_gives_unit_float32_rows_that_pass_gradients_to_the_pictures():
    model, pictures = student(embed_dim=24).eval(), heads(2).requires_grad_()
    for which in ("id", "head"):
        z = model.embed(pictures, which)
        assert z.shape == (2, 24) and z.dtype == torch.float32 and torch.allclose(z.norm(dim=1), torch.ones(2), atol=1e-6)
    model.similarity(pictures[:1], pictures[1:]).backward()
    assert pictures.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="which must be"):
        model.embed(pictures, "face")


def test_similarity_is_symmetric_and_one_with_itself():
    model = student().eval()
    a, b = heads(4), heads(4, seed=1)
    assert torch.allclose(model.similarity(a, b), model.similarity(b, a), atol=1e-6)
    assert torch.allclose(model.similarity(a, a), torch.ones(4), atol=1e-5)


def test_a_training_batch_of_one_works_and_leaves_the_running_statistics_alone():
    norm = BatchNorm(4)
    assert norm(torch.ones(1, 4)).isfinite().all() and norm.num_batches_tracked == 0
    z = student().train()(heads(1))
    assert z.z_id.isfinite().all() and z.z_head.isfinite().all()


def test_resizing_positions_keeps_a_grid_and_a_linear_ramp():
    ramp = torch.linspace(0, 1, 14).repeat(14, 1).reshape(1, 196, 1)
    assert torch.allclose(resize_pos_embed(ramp, (14, 14), (14, 14)), ramp, atol=1e-6)
    wide = resize_pos_embed(ramp, (14, 14), (14, 28)).view(14, 28)
    assert torch.allclose(wide[0], wide[7], atol=1e-6) and (wide[0].diff() > 0).all()
    with pytest.raises(ValueError, match="196 positions"):
        resize_pos_embed(ramp, (13, 13), (7, 7))


@pytest.mark.parametrize("sizes, message", [(dict(image_size=50), "multiple of patch_size: 50 is not one of 8"), (dict(dim=30), "multiple of heads: 30 is not one of 4"),
                                            (dict(depth=0), "must be positive"), (dict(design="triple"), "design must be one of"),
                                            (dict(patch_stride=9), "patch_stride must be 1 to patch_size"),
                                            (dict(design="transreid", classes=1), "at least 4 patches and 2 classes; got 16 and 1"),
                                            (dict(design="transreid", classes=3, image_size=8), "at least 4 patches")])
def test_impossible_sizes_are_refused_with_the_rule(sizes, message):
    with pytest.raises(ValueError, match=message):
        new_student(**{**SMALL, **sizes})


def test_zero_and_non_finite_rows_have_no_direction():
    assert torch.allclose(unit_rows(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))
    for bad in ([0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="zero or not finite"):
            unit_rows(torch.tensor([bad]))


def test_a_saved_student_loads_from_its_file_alone_and_gives_the_same_embedding(tmp_path):
    model, path = student(design="dual-head").eval(), str(tmp_path / "a.pt")
    save_student(path, model)
    again, preprocess = load_model(path)
    picture = preprocess(Image.new("L", (50, 70), 200))
    assert picture.shape == (3, 32, 32) and picture.unique().tolist() == pytest.approx([200 / 127.5 - 1])
    assert not again.training and torch.equal(again.embed(heads(2)), model.embed(heads(2)))
    torch.load(path, weights_only=True)


def test_a_checkpoint_with_a_missing_or_foreign_tensor_never_loads(tmp_path):
    model, path = student(), str(tmp_path / "a.pt")
    tensors = model.state_dict()
    for wrong in ({name: tensor for name, tensor in tensors.items() if name != "norm.bias"}, {"net." + name: tensor for name, tensor in tensors.items()}):
        save_student(path, model, wrong)
        with pytest.raises(ValueError, match="a.pt: its tensors do not fit"):
            load_model(path)


@pytest.mark.parametrize("content, message", [
    (b"", "empty"), (b"not a checkpoint", "no file of weights"), (b"PK\x03\x04 half a zip", "no file of weights"),
    (b"version https://git-lfs.github.com/spec/v1", "it starts with b'version https:/"), (b"\x99\0\0\0\0\0\0\0{" + b" " * 9, "no file of weights"),
    ((64).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}  ' + bytes(15), "no file of weights")])
def test_a_file_that_is_no_checkpoint_is_one_message_with_its_path(tmp_path, content, message):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ValueError, match=f"a.pt: {message}|{message}"):
        read_checkpoint(str(tmp_path / "a.pt"))


def test_a_missing_file_a_folder_and_a_file_of_another_kind_are_one_message_each(tmp_path):
    with pytest.raises(ValueError, match="b.pt: no such file"):
        read_checkpoint(str(tmp_path / "b.pt"))
    with pytest.raises(ValueError, match="a folder; expected a file of weights"):
        read_checkpoint(str(tmp_path))
    save_checkpoint(str(tmp_path / "c.pt"), {"kind": "teacher"})
    with pytest.raises(ValueError, match="expected a whole student checkpoint of this project, found 'teacher'"):
        read_checkpoint(str(tmp_path / "c.pt"))
    save_checkpoint(str(tmp_path / "d.pt"), {"kind": "student"})
    with pytest.raises(ValueError, match="expected a whole student checkpoint"):
        read_checkpoint(str(tmp_path / "d.pt"))


def test_a_damaged_checkpoint_is_one_message_wherever_the_damage_is(tmp_path):
    path = tmp_path / "a.pt"
    save_student(str(path), student())
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 15):
        path.write_bytes(whole[:place])
        with pytest.raises(ValueError, match="a.pt: (no file of weights|empty)"):
            read_checkpoint(str(path))


@pytest.mark.parametrize("error, told", [(KeyboardInterrupt, KeyboardInterrupt), (RuntimeError("file write failed"), OSError)])
def test_a_checkpoint_whose_writing_fails_leaves_the_old_one_alone(tmp_path, monkeypatch, error, told):
    path = str(tmp_path / "a.pt")
    save_student(path, student())

    def half(content, file):
        open(file, "wb").write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(told):
        save_checkpoint(path, {"kind": "student"})
    assert read_checkpoint(path)["trained"] == [] and os.listdir(tmp_path) == ["a.pt"]


def test_the_authors_checkpoint_loads_as_it_is_and_gives_the_embeddings_of_their_network(tmp_path, capsys):
    path = str(tmp_path / "ours_vit2cls.ckpt")
    torch.save({"state_dict": {**released.authors(), "head.kernel": torch.ones(512, 9)}, "epoch": 3}, path)
    model, preprocess = load_model(path)
    os.remove(path)  # 460 MB
    assert "the authors' network, all 294 tensors; 13 that a student does not use are left out (feature.*, head.*)" in capsys.readouterr().out
    z = model(released.pictures())
    assert released.agrees(z.z_id, "z_id") and released.agrees(z.z_head, "z_head")
    assert not model.training and preprocess(Image.new("RGB", (50, 70))).shape == (3, 112, 112)


def test_a_foreign_or_incomplete_student_never_loads(tmp_path):
    narrow = dict(image_size=32, dim=32, **released.SMALL_VIT)
    path, whole = str(tmp_path / "a.ckpt"), released.authors(**narrow)
    for prefix in ("model.", "net.", "module.", "module.model.", ""):
        torch.save({prefix + name.removeprefix("model."): tensor for name, tensor in whole.items()}, path)
        assert torch.equal(load_model(path)[0].cls_token, whole["model.cls_token"])
    for change, message in (({"model.head_feature.0.weight": None}, r"1 missing \(head_feature.0.weight\)"), ({"model.other": torch.ones(1)}, r"1 unknown \(other\)"),
                            ({"model.cls_token": torch.ones(1, 1, 32)}, "cls_token"), ({"model.feature_cls.2.weight": None}, r"1 missing \(feature_cls.2.weight\)"),
                            ({"model.feature_cls.2.weight": torch.tensor(1.0)}, r"feature_cls.2.weight \(\), not"), ({"model.norm.bias": torch.full((32,), torch.nan)}, "without finite"), ({"model.cls_token": None}, "not a student")):
        torch.save({name: tensor for name, tensor in {**whole, **change}.items() if tensor is not None}, path)
        with pytest.raises(ValueError, match=message):
            load_model(path)


def test_a_checkpoint_of_another_version_is_one_message(tmp_path):
    model, path = student(), str(tmp_path / "a.pt")
    save_student(path, model)
    torch.save({**torch.load(path, weights_only=True), "model_args": {"registers": 4}}, path)
    with pytest.raises(ValueError, match="another version of this project .*registers"):
        load_model(path)


@pytest.mark.parametrize("change", [{"model": None}, {"model": {"a": 3}}, {"model": {3: torch.ones(1)}}, {"model_args": 3}, {"trained": "x"},
                                    {"model_args": {"dim": 10 ** 12}}, {"model_args": {"mlp_ratio": math.inf}}, {"model_args": {"heads": 3, "dim": 32}}])
def test_an_own_checkpoint_with_wrong_kinds_of_values_is_one_message_with_its_path(tmp_path, change):
    model, path = student(), str(tmp_path / "a.pt")
    save_student(path, model)
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    with pytest.raises(ValueError, match="a.pt: "):
        load_model(path)


def test_safetensors_of_a_wrong_layout_never_load(tmp_path):
    path = str(tmp_path / "a.safetensors")

    def read(header, numbers=bytes(8)):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
        with open(path, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header + numbers)
        return read_weights(path)

    def entry(first=0, last=8, shape=(2,), dtype="F32"):
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}

    assert read({"a": entry(), "empty": entry(8, 8, (0, 3)), "__metadata__": {"format": "pt"}})["a"].tolist() == [0, 0]
    for header in ({"a": entry(-8, 0)}, {"a": entry(), "b": entry()}, {"a": entry(0, 4, (1,))}, {"a": entry(4, 8, (1,))}, {"a": entry(0, None)}, {"a": entry(0, 16, (4,))},
                   {"a": entry(shape=(-2,))}, {"a": entry(shape=(3,))}, {"a": entry(dtype="F8")}, {"a": 1}, '{"a": %s, "a": %s}' % ((json.dumps(entry()),) * 2)):
        with pytest.raises(ValueError, match="no file of weights, or a damaged one"):
            read(header)


def test_pictures_of_another_size_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"must be \(B, 3, 16, 16\); got \(2, 3, 24, 24\)"):
        HeadSimilarity(image_size=16, dim=16, depth=1, heads=2)(torch.zeros(2, 3, 24, 24))


def test_attention_maps_are_kept_on_request_only_of_the_last_blocks_and_change_nothing():
    torch.manual_seed(0)
    vit = VisionTransformer(image_size=16, patch_size=8, dim=12, depth=3, heads=2, num_cls=1).eval()
    images, maps = torch.randn(2, 3, 16, 16), []
    tokens = vit.tokens(images, maps, 2)
    assert [tuple(part.shape) for part in maps] == [(2, 2, 5, 5)] * 2 and torch.allclose(torch.stack(maps).sum(dim=-1), torch.ones(2, 2, 2, 5))
    assert torch.allclose(tokens, vit.tokens(images), atol=1e-6)
    assert torch.equal(vit(images), vit.tokens(images)) and len(maps) == 2


def test_blocks_computed_again_give_the_same_tokens_and_gradients():
    torch.manual_seed(0)
    network, images, found = VisionTransformer(image_size=16, patch_size=8, dim=16, depth=2, heads=2, num_cls=2).train(), torch.rand(3, 3, 16, 16), []
    for network.recompute in (False, True):
        network.zero_grad()
        tokens = network(images)
        tokens.square().sum().backward()
        found.append([tokens.detach(), *(parameter.grad for parameter in network.parameters())])
    assert all(torch.equal(kept, again) for kept, again in zip(*found))

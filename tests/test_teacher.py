"""teacher.py: released weights, the released networks, pre-training, the frozen teacher, the parts of the training loop."""
import argparse
import json
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import evaluate
import finetune_table
import released
import teacher
import teacher_table
from data import scan_heads
from losses import head_correlation
from model import save_checkpoint
from released import BASE_VIT, SMALL_VIT, ir, iresnet, pictures, vit, write_safetensors
from teacher import IR, UNITS, AdaFaceViT, check_finite, choose_device, load_teacher, make_optimiser, update

VIT = dict(image_size=32, patch_size=8, dim=32, depth=1, heads=2)
NARROW = dict(image_size=32, dim=32, **SMALL_VIT)  # the released ViT-small but for its width and its input


@pytest.fixture(scope="module")
def ir18():
    return ir(8)


@pytest.fixture(scope="module")
def narrow():
    return vit(**NARROW)


def saved(tmp_path, content):
    """-> path of a file with this content, written by torch.save."""
    torch.save(content, tmp_path / "weights.pt")
    return str(tmp_path / "weights.pt")


# ---------------------------------------------------------------- released weights

@pytest.mark.parametrize("name, millions, colour, content", [
    ("CVLface ViT-small", 96.0, "RGB", lambda: vit(**SMALL_VIT)), ("CVLface ViT-base", 114.9, "RGB", lambda: vit(**BASE_VIT)),
    ("AdaFace IR-18", 24.0, "BGR", lambda: {"state_dict": {**ir(8), "head.kernel": torch.ones(512, 9)}, "epoch": 25}),
    ("AdaFace IR-50", 43.6, "BGR", lambda: {"state_dict": ir(24)}), ("insightface iresnet-18", 24.0, "RGB", lambda: iresnet(8))])
def test_a_released_file_gives_the_embeddings_of_its_published_network(tmp_path, name, millions, colour, content):
    path = saved(tmp_path, content())
    network = load_teacher(path)
    os.remove(path)  # up to 460 MB
    assert network.description == f"{name}, {millions} M parameters, {colour} 112x112"
    assert not network.training and not any(p.requires_grad for p in network.parameters()) and network.trained == []
    assert released.agrees(network(pictures()), name)


@pytest.mark.parametrize("units, insightface, tensors, parameters", [
    (8, False, 179, 24_020_352), (24, False, 467, 43_585_600), (49, False, 917, 65_150_912), (8, True, 187, None), (24, True, 475, None), (49, True, 925, None)])
def test_the_ir_networks_have_the_released_number_of_tensors_and_parameters(units, insightface, tensors, parameters):
    with torch.device("meta"):
        network = IR(units=UNITS[units], insightface=insightface)
    assert len(network.state_dict()) == tensors
    assert parameters in (None, sum(parameter.numel() for parameter in network.parameters()))


def test_the_deepest_released_networks_are_recognised(tmp_path):
    assert load_teacher(saved(tmp_path, ir(49, "net."))).description.startswith("CVLface IR-101, 65.2 M parameters, RGB")
    assert load_teacher(saved(tmp_path, iresnet(49))).description.startswith("insightface iresnet-100, 65.2 M parameters, RGB")
    os.remove(tmp_path / "weights.pt")


def test_safetensors_bare_and_wrapped_files_hold_the_same_network(tmp_path, narrow):
    bare = {name.removeprefix("net."): tensor for name, tensor in narrow.items()}
    faces = torch.rand(2, 3, 32, 32) * 2 - 1
    expected = load_teacher(saved(tmp_path, bare))(faces)
    for wrap in ({"state_dict": narrow}, {f"module.{name}": tensor for name, tensor in narrow.items()}, {**bare, "mask_token": torch.zeros(1, 1, 32)}):
        assert torch.equal(load_teacher(saved(tmp_path, wrap))(faces), expected)
    write_safetensors(tmp_path / "model.safetensors", {f"model.{name}": tensor for name, tensor in narrow.items()})
    assert torch.equal(load_teacher(str(tmp_path / "model.safetensors"))(faces), expected)
    write_safetensors(tmp_path / "half", {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in narrow.items()})
    tiny = {name: tensor.to(torch.float8_e5m2) if tensor.is_floating_point() else tensor for name, tensor in narrow.items()}
    assert load_teacher(saved(tmp_path, tiny)).norm.weight.dtype == torch.float32
    half = load_teacher(str(tmp_path / "half"))  # told by its content, and computed in float32 all the same
    assert half.norm.weight.dtype == torch.float32 and torch.allclose(half(faces), expected, atol=0.1)


def test_another_colour_order_is_the_same_network_on_reversed_channels_and_is_told(tmp_path, ir18):
    path, faces = saved(tmp_path, {"state_dict": ir18}), pictures()
    usual, rgb = load_teacher(path), load_teacher(path, "RGB")
    assert torch.allclose(usual(faces), rgb(faces.flip(1)), rtol=1e-4, atol=1e-2) and not torch.allclose(usual(faces), rgb(faces), rtol=0.1)
    assert "RGB 112x112 (--colour; BGR is usual for this family)" in rgb.description and "usual" not in load_teacher(path, "BGR").description


def test_an_ir_file_that_does_not_tell_its_colours_must_be_told(tmp_path, ir18):
    path = saved(tmp_path, {name.removeprefix("model."): tensor for name, tensor in ir18.items()})
    with pytest.raises(ValueError, match="--colour BGR or --colour RGB"):
        load_teacher(path)
    assert load_teacher(path, "BGR").description.startswith("a bare IR-18, 24.0 M parameters, BGR")
    with pytest.raises(ValueError, match="--colour must be RGB or BGR; got 'rgb'"):
        load_teacher(path, "rgb")


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("net.norm.bias"), r"1 missing \(norm.bias\). Likely: only a part"),
    (lambda t: t.update({"net.extra": torch.ones(1)}), r"1 unknown \(extra\). Likely: another network, or a variant"),
    (lambda t: t.update({"net.norm.bias": torch.ones(7)}), r"norm.bias \(7,\), not \(32,\)\). Likely: another architecture"),
    (lambda t: t.update({"extra": torch.ones(1)}), r"1 tensors lack the prefix net. of the others \(first: extra\)"),
    (lambda t: t.update({"net.blocks.12." + name: t["net.blocks.0." + name] for name in ("norm1.weight", "norm1.bias")}), "one of 13 and 5"),
    (lambda t: t.pop("net.pos_embed"), "pos_embed is not there"),
    (lambda t: [t.pop(name) for name in list(t) if name.startswith("net.feature.")], r"12 missing \(feature.0.weight"),
    (lambda t: t.update({"net.keypoint_linear.weight": torch.ones(1, 1)}), "KP-RPE"),
    (lambda t: t.update({"net.blocks.0.attn.rpe_k.lookup_table_weight": torch.ones(1, 1)}), "iRPE"),
    (lambda t: t.update({"net.mobilenet.features.0.0.weight": torch.ones(1, 1)}), "Part-fViT"),
    (lambda t: t.update({"net.features.1.0.attn.relative_position_bias_table": torch.ones(1, 1)}), "Swin"),
    (lambda t: t.update({"net.cls_token": torch.ones(1, 2, 32), "net.head_feature.0.weight": torch.ones(32, 32)}), "a student, not a teacher"),
    (lambda t: t.clear() or t.update({"head.kernel": torch.ones(512, 9)}), "training head"),
    (lambda t: t.clear() or t.update({"weight": torch.ones(9, 512)}), "training head"),
    (lambda t: t.clear() or t.update({f"layer{i}.{j}.conv.weight": torch.ones(1, 1) for i in range(3) for j in range(9)}), "no teacher that this project knows"),
    (lambda t: t.update({"net.norm.bias": torch.full((32,), torch.inf)}), r"without finite numbers of the right kind \(norm.bias\). Likely: a damaged"),
    (lambda t: t.update({"net.norm.bias": torch.zeros(32, dtype=torch.int64)}), "without finite numbers of the right kind"),
    (lambda t: t.update({"net.norm.bias": torch.zeros(32).to_sparse()}), "without finite numbers of the right kind"),
    (lambda t: t.update({"net.norm.bias": torch.zeros(32, dtype=torch.complex64)}), "without finite numbers of the right kind"),
    (lambda t: t.update({"net.pos_embed": torch.tensor(1.0)}), "pos_embed is not there, or has another shape"),
    (lambda t: t.update({"net.head.kernel": torch.ones(3, 3)}), r"1 unknown \(head.kernel\)"),
    (lambda t: t.update({3: torch.ones(1)}), "expected named tensors"),
    (lambda t: t.update({"lr": 0.1}), "expected named tensors, bare or under state_dict"), (lambda t: t.clear(), "expected named tensors")])
def test_a_file_that_does_not_fit_exactly_never_loads_and_says_why(tmp_path, narrow, change, message):
    tensors = dict(narrow)
    change(tensors)
    with pytest.raises(ValueError, match=message):
        load_teacher(saved(tmp_path, tensors))


def test_a_missing_or_foreign_tensor_of_an_ir_network_is_named(tmp_path, ir18):
    without = {name: tensor for name, tensor in ir18.items() if name != "model.body.3.res_layer.3.weight"}
    with pytest.raises(ValueError, match=r"1 missing \(body.3.res_layer.3.weight\)"):
        load_teacher(saved(tmp_path, {"state_dict": without}))
    other = {f"layer{stage}.{i}.conv1.weight": torch.ones(1, 1) for stage in (1, 2, 3, 4) for i in (0, 1)}  # a ResNet-18, say
    with pytest.raises(ValueError, match=r"179 missing \(input_layer.0.weight.*8 of another shape .*Likely: another architecture"):
        load_teacher(saved(tmp_path, other))


def test_no_name_of_an_insightface_file_can_take_the_place_of_another(tmp_path):
    whole = iresnet(8)
    for name in ("input_layer.0.weight", "layer1.0.shortcut_layer.0.weight", "layer1.0.se.fc1.weight"):
        with pytest.raises(ValueError, match=f"{name} is no tensor of an insightface iresnet"):
            load_teacher(saved(tmp_path, {**whole, name: torch.ones(1)}))


def test_a_checkpoint_of_a_student_is_no_teacher(tmp_path):
    save_checkpoint(str(tmp_path / "best.pt"), {"kind": "student", "model": {}, "model_args": {}, "trained": []})
    with pytest.raises(ValueError, match="expected a whole teacher checkpoint of this project, found 'student'"):
        load_teacher(str(tmp_path / "best.pt"))


def test_a_lightning_file_with_classes_of_packages_that_are_not_installed_loads(tmp_path, narrow, monkeypatch):
    absent = types.ModuleType("lightning_that_is_not_installed")

    class ModelCheckpoint:
        def __init__(self):
            self.best, self.scores = torch.tensor(0.5), {"a": [1, 2]}

    class AttributeDict(dict):
        pass

    for kind in (ModelCheckpoint, AttributeDict):
        kind.__module__, kind.__qualname__ = absent.__name__, kind.__name__
        setattr(absent, kind.__name__, kind)
    ModelCheckpoint.Mode = type("Mode", (), {"__module__": absent.__name__, "__qualname__": "ModelCheckpoint.Mode"})
    monkeypatch.setitem(sys.modules, absent.__name__, absent)
    path = saved(tmp_path, {"state_dict": narrow, "epoch": 3, "callbacks": {ModelCheckpoint: ModelCheckpoint()},
                            "hyper_parameters": AttributeDict(args=argparse.Namespace(lr=0.1, tags={"a"}), lr=np.float64(0.1)),
                            "mode": ModelCheckpoint.Mode(), "numbers": torch.zeros(2, dtype=torch.complex64)})
    expected = load_teacher(saved(tmp_path / "..", narrow))(torch.zeros(1, 3, 32, 32))
    monkeypatch.delitem(sys.modules, absent.__name__)
    assert torch.equal(load_teacher(path)(torch.zeros(1, 3, 32, 32)), expected)


def test_a_file_that_would_run_a_command_on_loading_does_not_run_it(tmp_path, narrow):
    class Command:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/it_ran",)

    path = saved(tmp_path, {"state_dict": narrow, "callbacks": [Command()]})
    assert load_teacher(path).embed_dim == 512 and not os.path.exists(tmp_path / "it_ran")
    with pytest.raises(ValueError, match="expected named tensors"):
        load_teacher(saved(tmp_path, Command()))
    with pytest.raises(ValueError, match="expected named tensors"):
        load_teacher(saved(tmp_path, {**narrow, "net.norm.bias": Command()}))
    assert not os.path.exists(tmp_path / "it_ran")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak memory of a process is read from Linux's /proc")
def test_loading_vit_base_and_embedding_a_batch_takes_less_than_two_and_a_half_times_the_file(tmp_path):
    path = saved(tmp_path, vit(**BASE_VIT))
    script = ("import re, sys, torch; sys.path.insert(0, sys.argv[2]); from teacher import load_teacher\n"
              "with torch.inference_mode(): load_teacher(sys.argv[1])(torch.zeros(8, 3, 112, 112))\n"
              "print(1024 * int(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read()).group(1)))")
    peak = subprocess.run([sys.executable, "-c", script, path, os.path.dirname(teacher.__file__)], capture_output=True, text=True, check=True).stdout
    size = os.path.getsize(path)
    os.remove(path)
    assert size > 459e6 and int(peak) < 2.5 * size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_teacher_under_amp_stays_within_cosine_0_999_of_float32(tmp_path):
    device, dtype = choose_device("cuda", "auto")
    network, faces = load_teacher(saved(tmp_path, vit(**BASE_VIT))).to(device), pictures().to(device)
    with teacher.autocast(device, dtype):
        mixed = network(faces).float()
    assert torch.nn.functional.cosine_similarity(mixed, network(faces)).min() > 0.999


# ---------------------------------------------------------------- the own teacher and its training

@pytest.mark.parametrize("sizes, tensors, numbers", [(dict(depth=12, heads=8, mlp_ratio=5.0), 149, 95_952_384), (dict(), 281, 114_869_760)])
def test_the_released_adaface_vits_have_this_many_tensors_and_parameters(sizes, tensors, numbers):
    with torch.device("meta"):
        network = AdaFaceViT(**sizes)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert len(shapes) == tensors and sum(parameter.numel() for parameter in network.parameters()) == numbers
    assert shapes["feature.0.weight"] == (512, 100_352) and shapes["feature.3.running_mean"] == (512,) and "feature.0.bias" not in shapes


def test_a_pretrained_teacher_is_loaded_frozen_and_knows_its_size_and_its_identities(toy, tmp_path):
    index, path = scan_heads(toy), str(tmp_path / "teacher.pt")
    people = np.arange(48) < 40
    teacher.pretrain(index, people, path, vit=VIT, epochs=1, batch_size=32, lr=1e-3, seed=0, workers=0, device=torch.device("cpu"), dtype=None)
    frozen = load_teacher(path)
    assert not frozen.training and not any(parameter.requires_grad for parameter in frozen.parameters())
    assert frozen.image_size == 32 and frozen(torch.zeros(2, 3, 32, 32)).shape == (2, 32)
    assert torch.load(path, weights_only=True)["trained"] == index.names[:40]


def test_pretraining_is_the_same_for_a_seed_and_learns(toy, tmp_path, capsys):
    index, weights, options = scan_heads(toy), [], dict(vit=VIT, workers=0, device=torch.device("cpu"), dtype=None)
    for seed in (0, 0, 1):
        teacher.pretrain(index, np.ones(48, dtype=bool), str(tmp_path / "t.pt"), epochs=1, seed=seed, **options)
        weights.append(load_teacher(str(tmp_path / "t.pt")).norm.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    losses = []
    for epochs in (1, 8):
        capsys.readouterr()
        teacher.pretrain(index, np.ones(48, dtype=bool), str(tmp_path / "t.pt"), epochs=epochs, seed=0, **options)
        losses.append(float(capsys.readouterr().out.split("AdaFace ")[-1].split()[0]))
    assert losses[1] < 0.8 * losses[0]


def test_pretraining_without_two_people_with_faces_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="at least 2 training identities; found 0"):
        teacher.pretrain(scan_heads(tiny), np.ones(3, dtype=bool), str(tmp_path / "t.pt"), vit=VIT, epochs=1, batch_size=8, lr=1e-3, seed=0,
                         workers=0, device=torch.device("cpu"), dtype=None)


def test_pretraining_where_no_face_can_be_read_is_refused(tiny, tmp_path, capsys):
    for folder, _, names in os.walk(tiny):
        for name in names:
            os.makedirs(folder.replace("tiny", "faces"), exist_ok=True)
            open(os.path.join(folder.replace("tiny", "faces"), name), "wb").close()
    index = scan_heads(tiny, faces=tiny.replace("tiny", "faces"))
    with pytest.raises(ValueError, match="none of the 6 aligned faces"):
        teacher.pretrain(index, np.ones(3, dtype=bool), str(tmp_path / "t.pt"), vit=VIT, epochs=1, seed=0, workers=0, device=torch.device("cpu"), dtype=None)
    assert capsys.readouterr().out.count("warning: left out") == 5 and not os.path.exists(tmp_path / "t.pt")


def test_the_schedule_warms_up_linearly_and_ends_at_zero():
    optimiser, schedule = make_optimiser(nn.Linear(2, 2), lr=1.0, weight_decay=0.1, steps=100, warmup=10)
    rates = []
    for _ in range(100):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)]) and max(rates) == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and rates[99] < 1e-3 and optimiser.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_only_matrices_and_convolutions_decay():
    network = AdaFaceViT(**VIT)
    optimiser, _ = make_optimiser(network, lr=1.0, weight_decay=0.1, steps=10, warmup=1)
    decayed = {id(parameter) for parameter in optimiser.param_groups[0]["params"]}
    names = {name for name, parameter in network.named_parameters() if id(parameter) in decayed}
    assert "patch_embed.proj.weight" in names and "blocks.0.mlp.fc1.weight" in names
    assert not any(name.endswith("bias") or "norm" in name or name == "pos_embed" for name in names)
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.0]


def test_an_update_clips_the_gradient_and_moves_the_schedule():
    layer = nn.Linear(1, 1, bias=False)
    optimiser, schedule = make_optimiser(layer, lr=1.0, weight_decay=0.0, steps=10, warmup=1)
    update(1e6 * layer(torch.ones(1, 1)).sum(), layer, optimiser, schedule, torch.amp.GradScaler("cpu", enabled=False), clip=0.5)
    assert layer.weight.grad.item() == pytest.approx(0.5, rel=1e-4) and schedule.last_epoch == 1


def test_the_schedule_rests_where_a_scaled_step_was_skipped():
    layer = nn.Linear(1, 1, bias=False)
    optimiser, schedule = make_optimiser(layer, lr=1.0, weight_decay=0.0, steps=10, warmup=1)
    before = layer.weight.item()
    update(float("inf") * layer(torch.ones(1, 1)).sum(), layer, optimiser, schedule, torch.amp.GradScaler("cpu", enabled=True))
    assert layer.weight.item() == before and schedule.last_epoch == 0


def test_the_first_non_finite_loss_is_named_with_step_and_rate():
    assert check_finite({"a": torch.tensor(2.0)}, 1, 0.1) == {"a": 2.0}
    with pytest.raises(ValueError, match=r"step 7: the align loss is nan \(learning rate 0.001\)"):
        check_finite({"id": torch.tensor(1.0), "align": torch.tensor(math.nan), "head": torch.tensor(math.inf)}, 7, 1e-3)


def test_precision_is_plain_float32_on_a_cpu_and_impossible_choices_are_refused():
    assert choose_device("cpu", "auto") == (torch.device("cpu"), None)
    assert choose_device("cpu", "bf16") == (torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ValueError, match="--device must be auto, cpu, cuda or cuda:1; got meta"):
        choose_device("meta", "auto")
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        choose_device("cpu", "fp16")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU is available"):
            choose_device("cuda", "auto")


METHOD = teacher.DEFAULT_METHOD


@pytest.mark.parametrize("margin, name", [("arcface", "ArcFace"), ("cosface", "CosFace"), ("sphereface-r", "SphereFaceR"), ("triplet", "triplet")])
def test_every_margin_pretrains_a_teacher(toy, tmp_path, capsys, margin, name):
    index = scan_heads(toy)
    modules = teacher.pretrain(index, np.ones(48, dtype=bool), str(tmp_path / "t.pt"), vit=VIT, epochs=1, batch_size=32, lr=1e-3, seed=0, workers=0,
                               device=torch.device("cpu"), dtype=None, method={**METHOD, "margin": margin})
    assert f"  {name} " in capsys.readouterr().out and ("head" in modules) == (margin != "triplet")
    assert load_teacher(str(tmp_path / "t.pt"))(torch.zeros(1, 3, 32, 32)).isfinite().all()


def test_decorrelation_lowers_the_correlation_of_heads_and_leaves_the_network_as_it_was(toy, tmp_path):
    index, found = scan_heads(toy), {}
    for kind in ("none", "uniform", "hard"):
        modules = teacher.pretrain(index, np.ones(48, dtype=bool), str(tmp_path / "t.pt"), vit=VIT, epochs=4, batch_size=32, lr=3e-3, seed=0, workers=0,
                                   device=torch.device("cpu"), dtype=None, method={**METHOD, "decorrelate": kind, "decorrelate_weight": 10.0})
        maps, faces = [], torch.stack([torch.from_numpy(np.full((3, 32, 32), v / 8, np.float32)) + torch.randn(3, 32, 32) / 2 for v in range(8)])
        modules["network"].eval()(faces, maps, 1)
        found[kind] = head_correlation(maps[0]).mean().item()
        assert set(load_teacher(str(tmp_path / "t.pt")).state_dict()) == set(AdaFaceViT(**VIT).state_dict())
    assert found["uniform"] < 0.8 * found["none"] and found["hard"] < 0.8 * found["none"]


def test_a_teacher_goes_on_from_another_and_keeps_its_sizes(toy, tmp_path, capsys):
    sizes = ["--size", "32", "--dim", "48", "--depth", "2", "--heads", "4"]
    first, second = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    common = ["--data", toy, "--epochs", "1", "--batch-size", "32", "--workers", "0", "--device", "cpu"]
    teacher.main([*common, *sizes, "--out", first])
    teacher.main([*common, "--init", first, "--lr", "1e-9", "--out", second])
    a, b = (load_teacher(path) for path in (first, second))
    assert all(torch.allclose(tensor, b.state_dict()[name], atol=1e-4) for name, tensor in a.state_dict().items() if "weight" in name)
    for options, message in ((["--init", first, "--dim", "96"], "keeps the sizes"), (["--margin", "triplet", "--decorrelate", "hard"], "class centres"),
                             (["--decorrelate-blocks", "0"], "--decorrelate-blocks must"), ([*sizes, "--decorrelate", "hard", "--decorrelate-blocks", "3"], "at most the number of blocks, 2"),
                             ([*sizes, "--heads", "1", "--decorrelate", "uniform"], "at least 2 attention heads"),
                             (["--margin", "arcface", "--out", first], "exists already")):
        with pytest.raises(ValueError, match=message):
            teacher.main([*common, "--out", str(tmp_path / "c.pt"), *options])


def test_the_teacher_table_has_a_row_a_kind_and_a_column_a_figure(toy, tmp_path, capsys):
    teacher_table.main(["decorrelate", "--data", toy, "--seeds", "0", "1", "--epochs", "1", "--json", str(tmp_path / "t.json")])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["|", "| none", "| uniform", "| hard"] and all(len(row) == 6 for row in rows)
    table = json.load(open(tmp_path / "t.json", encoding="utf-8"))
    values = [row["AUC"] for row in table["hard"]]
    assert rows[3][2] == f"{sum(values) / 2:.3f} ({min(values):.3f} to {max(values):.3f})"
    assert all(row["hard faces: nearest wrong centre"] <= 1 and 0 < row["inter-head similarity"] < 1 for row in table["uniform"])


def test_the_finetune_table_marks_the_diagonal_and_the_highest_change_of_each_row(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "PEOPLE", 1)
    monkeypatch.setattr(evaluate, "SETTINGS", 12)
    teacher.main(["--data", toy, "--epochs", "1", "--size", "32", "--dim", "48", "--depth", "2", "--heads", "4", "--workers", "0", "--device", "cpu", "--out", str(tmp_path / "t.pt")])
    finetune_table.main(["--teacher", str(tmp_path / "t.pt"), "--attributes", "face_width", "skin", "--epochs", "1", "--people", "8"])
    out = capsys.readouterr().out
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in out.splitlines() if line.startswith("| ")}
    assert list(rows) == ["| varied in training", "| nothing: the energy itself", "| face_width", "| skin"] and "class centres go on too" in out
    assert rows["| face_width"][0].startswith("**") and rows["| skin"][1].startswith("**") and all("".join(rows[row]).count("*") % 4 == 1 for row in ("| face_width", "| skin"))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write to, root neither")
def test_an_output_that_cannot_be_written_is_heard_of_before_the_training(toy, monkeypatch):
    monkeypatch.setattr(teacher, "pretrain", lambda *_, **__: pytest.fail("trained first"))
    with pytest.raises((ValueError, OSError)):
        teacher.main(["--data", toy, "--out", "/proc/teacher.pt", "--workers", "0", "--device", "cpu"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's disk that is always full")
def test_a_full_disk_is_one_message_and_leaves_the_old_checkpoint(tmp_path):
    path = str(tmp_path / "a.pt")
    save_checkpoint(path, {"kind": "teacher", "x": torch.ones(2)})
    os.symlink("/dev/full", f"{path}.tmp")
    with pytest.raises((ValueError, OSError)):  # what command_line tells in one line
        save_checkpoint(path, {"kind": "teacher", "x": torch.ones(10 ** 6)})
    assert torch.load(path, weights_only=True)["x"].tolist() == [1, 1]

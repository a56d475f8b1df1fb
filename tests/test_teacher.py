"""teacher.py: the released network's shape, pre-training, the frozen teacher, and the parts of the training loop."""
import math
import os

import numpy as np
import pytest
import torch
from torch import nn

import teacher
from data import scan_heads
from teacher import AdaFaceViT, check_finite, choose_device, load_teacher, make_optimiser, update

VIT = dict(image_size=32, patch_size=8, dim=32, depth=1, heads=2)


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

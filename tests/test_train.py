"""train.py: a run from end to end that must learn, resume that is exact, and refusals."""
import json
import os
import signal
import shutil
import socket
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch

import evaluate
import paper_table
import released
import train
from conftest import paint, write_landmarks
from data import Batch, HeadDataset, IdentitySampler, make_toy
from model import new_student, to_unit
from test_data import FACE

ROOT = os.path.join(os.path.dirname(__file__), "..")
SMALL = ["--size", "32", "--dim", "48", "--depth", "2", "--heads", "4", "--batch-size", "48", "--workers", "0", "--device", "cpu"]
SCRIPT = [sys.executable, os.path.join(ROOT, "train.py")]


@pytest.fixture(scope="module")
def learned(toy, tmp_path_factory):
    """One whole run on the small toy world; -> its folder."""
    out = str(tmp_path_factory.mktemp("run") / "toy")
    train.main(["--data", toy, "--out", out, "--epochs", "16", "--teacher-epochs", "10", "--lr", "3e-3", "--eval-every", "8", *SMALL])
    return out


def log(out):
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def assert_equal_runs(first, second):
    """The same weights and log lines, but for the times."""
    a, b = (weights(run / "last.pt") for run in (first, second))
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = ([{**line, "seconds": 0, "data_seconds": 0} for line in log(run)] for run in (first, second))
    assert a == b


def test_a_run_learns_head_similarity_of_people_it_never_saw(learned):
    with open(os.path.join(learned, "results.json"), encoding="utf-8") as file:
        table = {row["name"]: row for row in json.load(file)["table"]}
    assert list(table) == ["teacher, aligned faces", "teacher, whole heads", "student, whole heads", "student, from behind"]
    student = table["student, whole heads"]
    assert student["head"]["auc"] > 0.75
    assert student["ordering"]["mean"]["R1"] > student["ordering"]["mean"]["R2"] > student["ordering"]["mean"]["R3"]


def test_a_run_logs_a_line_an_epoch_and_its_losses_fall(learned):
    lines = log(learned)
    assert [line["epoch"] for line in lines] == list(range(1, 17))
    assert all(0 <= line["data_seconds"] <= line["seconds"] for line in lines)
    assert lines[-1]["total"] < 0.8 * lines[0]["total"] and [("head_vr" in line) for line in lines].count(True) == 2
    assert os.path.getsize(os.path.join(learned, "gallery.png")) > 1000


def test_every_file_of_a_run_loads_safely_and_evaluates_to_the_printed_numbers(learned, tmp_path, capsys):
    for name in ("teacher.pt", "last.pt", "best.pt"):
        torch.load(os.path.join(learned, name), weights_only=True)
    evaluate.main(["--ckpt", os.path.join(learned, "best.pt"), "--json", str(tmp_path / "again.json"), "--workers", "0", "--batch-size", "7"])
    first, again = (json.load(open(path, encoding="utf-8"))["table"][-1] for path in (os.path.join(learned, "results.json"), tmp_path / "again.json"))
    assert again["pairs"] == first["pairs"] and again["identity"]["auc"] == pytest.approx(first["identity"]["auc"], abs=1e-5)
    assert "student, whole heads" in capsys.readouterr().out


def test_a_checkpoint_holds_the_thresholds_of_its_own_held_out_evaluation(learned, toy, capsys):
    best, last = (torch.load(os.path.join(learned, name), weights_only=True) for name in ("best.pt", "last.pt"))
    assert last["thresholds"] is not None and set(last) - set(best) == {"optimiser", "schedule", "scaler", "step", "batch", "sums", "counted", "random_states"}
    results = json.load(open(os.path.join(learned, "results.json"), encoding="utf-8"))
    for task in ("identity", "head"):
        assert best["thresholds"]["id"][task] == pytest.approx(results["table"][2][task]["threshold"]["0.001"], abs=1e-5)
    assert best["thresholds"]["id"]["far"] == 1e-3 and best["thresholds"]["head"]["head"] != best["thresholds"]["id"]["head"]
    person = os.path.join(toy, "person_0000")
    looks = sorted(os.listdir(person))
    reference = os.path.join(person, looks[0], sorted(os.listdir(os.path.join(person, looks[0])))[0])
    assert evaluate.main(["--ckpt", os.path.join(learned, "best.pt"), "--compare", reference, os.path.join(person, looks[0]), "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 frames scored: mean" in out and f"same look above {best['thresholds']['id']['head']:.3f}" in out
    assert best["thresholds"]["id"]["people"] == results["table"][2]["people"] and best["thresholds"]["id"]["data"] == "toy"


def test_a_checkpoint_whose_settings_are_not_whole_is_refused(learned, tmp_path):
    content = torch.load(os.path.join(learned, "best.pt"), weights_only=True)
    for settings in ({}, "x", {**content["settings"], "data": None}):
        broken = {**content, "settings": settings}
        if isinstance(settings, dict) and settings:
            del broken["root"]
        torch.save(broken, tmp_path / "broken.pt")
        with pytest.raises(ValueError, match="the settings of its run are not whole"):
            evaluate.main(["--ckpt", str(tmp_path / "broken.pt")])


def test_evaluating_people_that_were_trained_on_shows_a_notice(learned, toy, capsys):
    evaluate.main(["--ckpt", os.path.join(learned, "best.pt"), "--data", toy, "--workers", "0"])
    assert "of 48 identities have names that a student was trained on" in capsys.readouterr().out


def test_four_epochs_equal_two_and_two_resumed(learned, toy, tmp_path, monkeypatch):
    options = ["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--epochs", "4", "--steps", "3", *SMALL]
    train.main([*options, "--out", str(tmp_path / "straight")])
    save = train.save

    def save_and_stop(run, name):
        save(run, name)
        if name == "last.pt" and run.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train.main([*options, "--out", str(tmp_path / "halves")])
    monkeypatch.setattr(train, "save", save)
    with open(tmp_path / "halves" / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"epoch": 3, "torn')
    train.main(["--resume", str(tmp_path / "halves" / "last.pt")])
    assert_equal_runs(tmp_path / "straight", tmp_path / "halves")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_a_whole_step_and_the_resumed_run_equals_one_without(learned, toy, tmp_path, number):
    options = ["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--epochs", "3", "--steps", "80", *SMALL]
    train.main([*options, "--out", str(tmp_path / "straight")])
    with subprocess.Popen([*SCRIPT, *options, "--out", str(tmp_path / "stopped")], stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if line.startswith("epoch 1/3, step 80/240"):  # seconds from its end, so that a busy machine is in time
                run.send_signal(number)
                break
        out = run.stdout.read()
    assert run.returncode == 128 + number and "stopped after step " in out
    last = str(tmp_path / "stopped" / "last.pt")
    assert f"go on with: python train.py --resume {last}" in out
    with open(tmp_path / "stopped" / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"epoch": 2, "torn')
    train.main(["--resume", last])
    assert_equal_runs(tmp_path / "straight", tmp_path / "stopped")


def test_a_signal_to_all_processes_of_a_run_saves_it_and_its_workers_say_nothing(learned, toy, tmp_path):
    options = ["--data", toy, "--align-weight", "0", "--epochs", "900", "--steps", "5", *SMALL, "--workers", "2"]
    with subprocess.Popen([*SCRIPT, *options, "--out", str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        next(line for line in run.stdout if line.startswith("epoch 2/900"))
        os.killpg(run.pid, signal.SIGTERM)
        _, error = run.communicate(timeout=60)
    assert run.returncode == 143 and "Traceback" not in error and torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] >= 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_at_once_with_its_own_status(number):
    run = types.SimpleNamespace(stopped=0)
    with pytest.raises(SystemExit) as ended, train.signals_stop(run):
        os.kill(os.getpid(), number)
        assert run.stopped == number
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number


def test_no_two_runs_write_to_one_folder(learned, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = f"import sys, train; print(train.open_run(train.parse(['--data', {toy!r}])), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", other], env={**os.environ, "PYTHONPATH": os.path.abspath(ROOT)}, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as holder:
        first, *more = (os.path.join("runs", f"toy-dual-cls{number}") for number in ("", "-2", "-3"))
        os.makedirs(more[0])
        open(os.path.join(more[0], "dear"), "wb").close()
        assert holder.stdout.readline().strip() == first
        shutil.copy(os.path.join(learned, "last.pt"), first)
        for options in (["--data", toy, "--out", first], ["--resume", os.path.join(first, "last.pt")]):
            with pytest.raises(ValueError, match="holds a run already" if "--out" in options else "another run is writing to it"):
                train.main([*options, "--workers", "0"])
        os.remove(os.path.join(first, "last.pt"))
        with pytest.raises(ValueError, match="another run is writing to it"):
            train.open_run(train.parse(["--data", toy, "--out", first]))
        assert train.open_run(train.parse(["--data", toy])) == more[1]
        holder.kill()
    assert train.open_run(train.parse(["--data", toy, "--out", first])) == first  # however the other ended


def test_a_last_pt_without_its_best_pt_goes_on_with_the_student_at_hand(learned, tmp_path, capsys):
    shutil.copy(os.path.join(learned, "last.pt"), tmp_path)
    train.main(["--resume", str(tmp_path / "last.pt")])
    assert "notice: best.pt is gone" in capsys.readouterr().out
    assert all(torch.equal(tensor, weights(tmp_path / "best.pt")[name]) for name, tensor in weights(tmp_path / "last.pt").items())


def test_a_run_never_lies_among_the_pictures(toy):
    with pytest.raises(ValueError, match="where it would become a person"):
        train.main(["--data", toy, "--out", os.path.join(toy, "runs", "a"), *SMALL])


def test_a_run_killed_ten_times_always_has_a_whole_last_pt_and_ends_as_one_without(learned, toy, tmp_path):
    options = ["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--epochs", "60", "--steps", "5", "--eval-every", "7", *SMALL]
    train.main([*options, "--out", str(tmp_path / "straight")])
    last, killed, rng = tmp_path / "killed" / "last.pt", 0, np.random.default_rng(0)
    for _ in range(10):
        how = ["--resume", str(last)] if last.exists() else [*options, "--out", str(tmp_path / "killed")]
        with subprocess.Popen([*SCRIPT, *how], stdout=subprocess.PIPE, text=True) as run:
            next(line for line in run.stdout if line.startswith(("settings: ", "resumed: ")))
            time.sleep(rng.uniform(0, 0.6))
            run.kill()
        killed += run.returncode == -signal.SIGKILL
        if last.exists():
            assert torch.load(last, weights_only=True)["epoch"] <= 60
    assert killed == 10
    train.main(["--resume", str(last)] if last.exists() else [*options, "--out", str(tmp_path / "killed")])
    assert_equal_runs(tmp_path / "straight", tmp_path / "killed")  # a torn line of the log would be no JSON
    assert len(log(tmp_path / "killed")) == 60


def test_resuming_a_finished_run_says_so_and_changes_nothing(learned, capsys):
    before = open(os.path.join(learned, "last.pt"), "rb").read()
    os.remove(os.path.join(learned, "results.json"))
    train.main(["--resume", os.path.join(learned, "last.pt")])
    assert os.path.exists(os.path.join(learned, "results.json"))  # a run killed before its report gets it now
    assert "this run is finished" in capsys.readouterr().out and open(os.path.join(learned, "last.pt"), "rb").read() == before


def test_a_run_folder_is_never_overwritten(learned, toy, tmp_path):
    with pytest.raises(ValueError, match="holds a run already"):
        train.main(["--data", toy, "--out", learned, *SMALL])
    (tmp_path / "best.pt").write_bytes(b"dear")
    with pytest.raises(ValueError, match="holds a run already: choose another --out"):
        train.main(["--data", toy, "--out", str(tmp_path), *SMALL])


@pytest.mark.parametrize("options, message", [(["--dim", "64"], "--dim cannot change"), (["--lr", "1"], "--lr cannot change"), (["--out", "x"], "--out goes with a new run")])
def test_resume_keeps_the_settings_of_its_run(learned, options, message):
    with pytest.raises(ValueError, match=message):
        train.main(["--resume", os.path.join(learned, "last.pt"), *options])


def test_resume_of_an_older_file_keeps_the_defaults_of_settings_that_it_does_not_know(learned, tmp_path):
    content = torch.load(os.path.join(learned, "last.pt"), weights_only=True)
    del content["settings"]["id_weight"]
    torch.save(content, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="--id-weight cannot change"):
        train.main(["--resume", str(tmp_path / "last.pt"), "--id-weight", "3"])


@pytest.mark.parametrize("damage", [{"image_size": "32"}, {"patch_stride": 2.5}, {"classes": 3}, {"depth": None}])
def test_a_start_with_damaged_sizes_is_one_message(learned, toy, tmp_path, damage):
    content = torch.load(os.path.join(learned, "last.pt"), weights_only=True)
    content["model_args"] |= damage
    torch.save(content, tmp_path / "last.pt")
    for options in (["--resume", str(tmp_path / "last.pt")], ["--init", str(tmp_path / "last.pt"), "--data", toy, "--out", str(tmp_path / "run")]):
        with pytest.raises(ValueError, match="damaged, or made by another version"):
            train.main(options)
    assert not os.path.exists(tmp_path / "run")


def test_resume_takes_the_same_options_again_however_their_paths_are_spelt(learned, toy, monkeypatch, capsys):
    monkeypatch.chdir(os.path.dirname(toy))
    train.main(["--resume", os.path.relpath(os.path.join(learned, "last.pt")), "--data", os.path.basename(toy), "--dim", "48"])
    assert "this run is finished" in capsys.readouterr().out


def test_a_moved_run_is_evaluated_with_its_own_teacher_from_any_folder(learned, toy, tmp_path, monkeypatch, capsys):
    options = ["--data", toy, "--epochs", "1", "--teacher-epochs", "1", "--steps", "1", *SMALL]
    train.main([*options, "--out", str(tmp_path / "run")])
    first = capsys.readouterr().out
    os.rename(tmp_path / "run", tmp_path / "moved")
    shutil.copytree(learned, tmp_path / "run")  # another run, and another teacher, at the old place
    monkeypatch.chdir(tmp_path)
    evaluate.main(["--ckpt", "moved/best.pt", "--workers", "0"])
    rows = [[line for line in out.splitlines() if line.startswith("teacher, aligned faces ")] for out in (first, capsys.readouterr().out)]
    assert rows[0] == rows[1]


def test_a_resumed_run_never_evaluates_people_it_was_trained_on(toy, tmp_path, capsys):
    shutil.copytree(toy, tmp_path / "people")
    train.main(["--data", str(tmp_path / "people"), "--out", str(tmp_path / "run"), "--align-weight", "0", "--epochs", "1", "--steps", "1", *SMALL])
    trained = set(torch.load(tmp_path / "run" / "last.pt", weights_only=True)["trained"])
    for name in set(os.listdir(tmp_path / "people")) - trained - {"landmarks.csv", "attributes.csv"} | {min(trained)}:
        shutil.rmtree(tmp_path / "people" / name)
    train.main(["--resume", str(tmp_path / "run" / "last.pt"), "--epochs", "2"])
    assert set(torch.load(tmp_path / "run" / "last.pt", weights_only=True)["trained"]) == trained and "head_vr" not in log(tmp_path / "run")[-1]
    assert "notice: the folder has changed: 0 training identities are new, 1 are gone" in capsys.readouterr().out


def test_a_folder_without_one_readable_picture_ends_the_run(tiny, tmp_path):
    for folder, _, names in os.walk(tiny):
        for name in names:
            open(os.path.join(folder, name), "wb").close()
    with pytest.raises(ValueError, match="not one picture of this epoch could be read"):
        train.main(["--data", tiny, "--out", str(tmp_path / "run"), "--align-weight", "0", *SMALL])
    assert not os.path.exists(tmp_path / "run" / "best.pt")


def test_a_worse_evaluation_never_replaces_best(learned, toy, tmp_path, monkeypatch):
    scores = iter([{"identity_vr": 0.5, "head_vr": 0.5}, {"identity_vr": 0.4, "head_vr": 0.5}])
    monkeypatch.setattr(train, "score", lambda run: next(scores))
    train.main(["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--out", str(tmp_path / "run"), "--epochs", "2", "--steps", "1", "--eval-every", "1", *SMALL])
    best, last = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("best.pt", "last.pt"))
    assert (best["epoch"], best["best"], last["epoch"]) == (1, 0.5, 2)


def test_every_tensor_of_the_teacher_stays_as_it_is_and_only_the_student_trains(learned, toy, tmp_path):
    settings = train.parse(["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--out", str(tmp_path / "run"), "--steps", "3", *SMALL])
    train.open_run(settings)
    run = train.prepare(settings, torch.device("cpu"), None, *train.read_start(settings))
    before, targets = {name: tensor.clone() for name, tensor in run.teacher.state_dict().items()}, run.targets.clone()
    assert any(name.endswith("running_mean") for name in before)
    train.train_epoch(run)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.teacher.state_dict().items())
    assert not any(module.training for module in run.teacher.modules()) and torch.equal(run.targets, targets) and not run.targets.requires_grad
    trained = {id(parameter) for group in run.optimiser.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in run.student.parameters()} and not any(p.requires_grad for p in run.teacher.parameters())
    train.save(run, "last.pt")
    assert set(weights(tmp_path / "run" / "last.pt")) == set(run.student.state_dict()) and not any(module is run.teacher for module in run.student.modules())


def test_each_target_is_the_frozen_teacher_on_the_aligned_face_of_its_frame(learned, toy, tmp_path):
    settings = train.parse(["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--out", str(tmp_path / "run"), *SMALL])
    run, teacher = train.prepare(settings, torch.device("cpu"), None, *train.read_start(settings)), train.load_teacher(os.path.join(learned, "teacher.pt"))
    with_target = run.has_target.nonzero()[:, 0]
    trained = np.isin(np.array(run.index.names), run.trained)[run.index.identity]
    assert np.array_equal(run.has_target.numpy(), trained & run.index.has_face)
    for row in with_target[[0, 7, -1]].tolist():
        _, _, face, *_ = HeadDataset(run.index, head_size=0, face_size=32)[row]
        assert torch.allclose(run.targets[row], teacher(to_unit(face)[None])[0], atol=1e-4)


def test_a_teacher_that_saw_held_out_people_is_told(learned, toy, tmp_path, capsys):
    content = torch.load(os.path.join(learned, "teacher.pt"), weights_only=True)
    everyone = sorted(name for name in os.listdir(toy) if name.startswith("person"))
    torch.save({**content, "trained": everyone}, tmp_path / "teacher.pt")
    settings = train.parse(["--data", toy, "--teacher", str(tmp_path / "teacher.pt"), "--out", str(tmp_path / "run"), *SMALL])
    run = train.prepare(settings, torch.device("cpu"), None, *train.read_start(settings))
    assert f"trained on {48 - len(run.trained)} identities of the same name as held-out ones" in capsys.readouterr().out


def test_the_student_trunk_starts_from_a_teacher_of_its_sizes_only(learned, toy, tmp_path, capsys):
    teacher = ["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--out", str(tmp_path / "run")]
    frozen = train.load_teacher(teacher[3])

    def student(*options):
        settings = train.parse([*teacher, *SMALL, *options])
        return train.make_student(settings, train.student_sizes(settings, frozen, None), frozen, None)

    same = student()
    assert torch.equal(same.blocks[1].mlp.fc2.weight, frozen.blocks[1].mlp.fc2.weight) and "27 of 27 tensors from the teacher" in capsys.readouterr().out
    student("--depth", "1")
    assert "from scratch" in capsys.readouterr().out
    student("--heads", "2")
    assert "from scratch" in capsys.readouterr().out
    larger = student("--size", "64")
    assert larger.pos_embed.shape == (1, 64, 48) and "27 of 27 tensors from the teacher" in capsys.readouterr().out


def test_a_released_vit_teacher_sets_the_sizes_of_the_student_and_of_nothing_else(toy, tmp_path, capsys):
    torch.save(released.vit(image_size=32, dim=32, **released.SMALL_VIT), tmp_path / "model.pt")
    run = ["--data", toy, "--teacher", str(tmp_path / "model.pt"), "--out", str(tmp_path / "run"), "--epochs", "1", "--steps", "1", "--batch-size", "8", "--workers", "0"]
    train.main(run)
    out, checkpoint = capsys.readouterr().out, torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert "teacher: a ViT of dim 32, taken to have 8 heads, 0.2 M parameters, RGB 32x32" in out and "student trunk: 137 of 137 tensors from the teacher" in out
    assert checkpoint["model_args"] == dict(design="dual-cls", embed_dim=512, image_size=32, patch_size=8, dim=32, depth=12, heads=8, mlp_ratio=5.0, patch_stride=None)
    assert "teacher, aligned faces" in out and "teacher: a ViT" in out.split("mean s")[0]
    settings = train.parse([*run, "--size", "64", "--heads", "4"])
    assert train.read_start(settings)[2] == {**checkpoint["model_args"], "image_size": 64, "heads": 4}


def test_an_ir_teacher_leaves_the_student_to_start_from_scratch_and_its_colours_are_kept(tmp_path, capsys):
    toy = str(tmp_path / "few")
    make_toy(toy, people=6, looks=2, frames=2)
    torch.save({"state_dict": released.ir(8)}, tmp_path / "ir.ckpt")
    train.main(["--data", toy, "--teacher", str(tmp_path / "ir.ckpt"), "--colour", "RGB", "--out", str(tmp_path / "run"), "--epochs", "1", "--steps", "1", *SMALL])
    out = capsys.readouterr().out
    assert "AdaFace IR-18, 24.0 M parameters, RGB 112x112 (--colour; BGR is usual for this family)" in out
    assert "student trunk: from scratch, since this teacher is no ViT" in out
    evaluate.main(["--ckpt", str(tmp_path / "run" / "best.pt"), "--workers", "0", "--device", "cpu"])
    again = capsys.readouterr().out
    assert "RGB 112x112 (--colour" in again and [line for line in again.splitlines() if line.startswith("teacher, ")] == [line for line in out.splitlines() if line.startswith("teacher, ")]


def test_fine_tuning_starts_from_the_students_weights_and_keeps_its_sizes(learned, toy, tmp_path, capsys):
    best = os.path.join(learned, "best.pt")
    options = ["--data", toy, "--init", best, "--out", str(tmp_path / "run"), "--epochs", "1", "--batch-size", "48", "--workers", "0", "--device", "cpu"]
    settings = train.parse(options)
    run = train.prepare(settings, torch.device("cpu"), None, *train.read_start(settings))
    assert all(torch.equal(tensor, weights(best)[name]) for name, tensor in run.student.state_dict().items())
    assert run.teacher_path == os.path.abspath(os.path.join(learned, "teacher.pt"))  # that of its own run
    assert len(run.test_rows) > 0 and run.trained == sorted(torch.load(best, weights_only=True)["trained"])
    for wrong, message in ((["--dim", "64"], "its dim is 48, not 64"), (["--design", "shared"], "its design is dual-cls, not shared")):
        with pytest.raises(ValueError, match=message):
            train.main([*options, *wrong])
    larger = train.parse([*options, "--size", "64"])
    assert train.make_student(larger, train.read_start(larger)[2], None, run.initial).pos_embed.shape == (1, 64, 48)
    train.main([*options[:-6], "--epochs", "1", "--steps", "1", "--batch-size", "8", "--workers", "0"])
    shutil.copy(os.path.join(learned, "teacher.pt"), tmp_path / "moved.pt")  # a teacher may move, but not change
    train.main(["--resume", str(tmp_path / "run" / "last.pt"), "--epochs", "2", "--teacher", str(tmp_path / "moved.pt")])
    assert "resumed" in capsys.readouterr().out and len(log(tmp_path / "run")) == 2
    torch.save(released.vit(image_size=32, dim=32, **released.SMALL_VIT), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="--resume needs the run's teacher, own ViT.* is a ViT of dim 32"):
        train.main(["--resume", str(tmp_path / "run" / "last.pt"), "--epochs", "3", "--teacher", str(tmp_path / "other.pt")])


def test_the_authors_checkpoint_is_fine_tuned_and_evaluated_as_it_is(toy, tiny, tmp_path, capsys):
    path = str(tmp_path / "ours_vit2cls.ckpt")
    torch.save({"state_dict": released.authors(image_size=32, dim=32, **released.SMALL_VIT)}, path)
    torch.save(released.vit(image_size=32, dim=32, **released.SMALL_VIT), tmp_path / "model.pt")
    train.main(["--data", toy, "--init", path, "--teacher", str(tmp_path / "model.pt"), "--out", str(tmp_path / "run"), "--epochs", "1", "--steps", "1", "--batch-size", "8", "--workers", "0", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "student: starts from " + path in out and "teacher, aligned faces" in out
    assert "highest learning rate 0.00093" in out and "held out, epoch 0: identity_vr" in out
    evaluate.main(["--ckpt", path, "--data", tiny, "--embedding", "head", "--workers", "0", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "design dual-cls" in out and "embedding of the students: z_head" in out and "6 pictures of 3 people" in out
    train.main(["--data", toy, "--init", path, "--out", str(tmp_path / "alone"), "--epochs", "1", "--steps", "1", "--batch-size", "8", "--workers", "0", "--device", "cpu"])
    assert "notice: no alignment, since the teacher" in capsys.readouterr().out and log(tmp_path / "alone")[0]["align"] == 0
    with pytest.raises(ValueError, match="nothing to learn"):
        train.main(["--data", toy, "--init", path, "--hier-weight", "0"])
    for wrong, message in ((["--resume", path], "may go with --init"), (["--init", path, "--align-weight", "0", "--teacher", path], "a student, not a teacher")):
        with pytest.raises(ValueError, match=message):
            train.main(["--data", toy, *wrong])
    with pytest.raises(ValueError, match="comes without data of its own: add --data PATH"):
        evaluate.main(["--ckpt", path])


def test_people_whom_the_initial_student_knows_are_not_held_out(learned, toy, tmp_path, capsys):
    content = torch.load(os.path.join(learned, "best.pt"), weights_only=True)
    known = next(name for name in sorted(os.listdir(toy)) if name.startswith("person") and name not in content["trained"])
    torch.save({**content, "trained": [known]}, tmp_path / "initial.pt")
    settings = train.parse(["--data", toy, "--align-weight", "0", "--init", str(tmp_path / "initial.pt"), "--out", str(tmp_path / "run"), *SMALL])
    run = train.prepare(settings, torch.device("cpu"), None, *train.read_start(settings))
    assert known in run.trained and run.index.names.index(known) not in run.index.identity[run.test_rows]
    assert "notice: 12 pictures are not held out" in capsys.readouterr().out


@pytest.mark.parametrize("design", ["dual-head", "shared"])
def test_the_ablation_designs_and_no_alignment_train(toy, tmp_path, design):
    train.main(["--data", toy, "--out", str(tmp_path / design), "--design", design, "--align-weight", "0", "--aggregate", "mean", "--epochs", "1", "--steps", "2", *SMALL])
    line = log(tmp_path / design)[0]
    assert line["total"] == pytest.approx(line["id"] + line["head"], rel=1e-5)
    assert "teacher.pt" not in os.listdir(tmp_path / design)


def test_transreid_trains_resumes_exactly_and_is_evaluated_like_a_student(learned, toy, tmp_path, capsys):
    options = ["--data", toy, "--design", "transreid", "--teacher", os.path.join(learned, "teacher.pt"), "--patch-stride", "6", "--steps", "3", *SMALL]
    train.main([*options, "--epochs", "2", "--out", str(tmp_path / "whole")])
    assert "trunk: 40 of 40 tensors from the teacher" in capsys.readouterr().out
    line = log(tmp_path / "whole")[0]
    assert line["total"] == pytest.approx(line["cross-entropy"] + line["triplet"], abs=1e-5) and "align" not in line
    best, last = (str(tmp_path / "whole" / name) for name in ("best.pt", "last.pt"))
    checkpoint = torch.load(best, weights_only=True)
    assert checkpoint["model_args"]["classes"] == len(checkpoint["trained"]) == 35
    train.main(["--resume", last, "--epochs", "3"])
    assert len(log(tmp_path / "whole")) == 3
    assert evaluate.main(["--ckpt", best, "--embedding", "head", "--workers", "0"]) is None and "design transreid" in capsys.readouterr().out
    for wrong, message in ((["--design", "transreid"], "does not go with transreid"), ([], "its design is transreid, not dual-cls")):
        with pytest.raises(ValueError, match=message):
            train.main(["--data", toy, "--init", best, *wrong, "--out", str(tmp_path / "no"), "--workers", "0"])


def test_transreid_needs_no_face_without_a_teacher_and_the_same_people_to_resume(tiny, tmp_path):
    out, options = str(tmp_path / "run"), ["--data", tiny, "--design", "transreid", "--align-weight", "0", "--epochs", "1", "--batch-size", "8", *SMALL[:8],
                                           "--workers", "0"]
    train.main([*options, "--out", out])
    paint(f"{tiny}/E/s0/0.jpg")
    paint(f"{tiny}/F/s0/0.jpg")
    with pytest.raises(ValueError, match="the classifiers of this run know other people than the 3 that"):
        train.main(["--resume", os.path.join(out, "last.pt"), "--epochs", "2"])


def test_the_loss_may_be_on_one_embedding_only(learned, toy, tmp_path):
    options = ["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--align-weight", "0", "--epochs", "1", "--steps", "1", *SMALL]
    for weight, still in (("--id-weight", "feature_cls.0.weight"), ("--head-weight", "head_feature.0.weight")):
        out = tmp_path / still
        train.main([*options, weight, "0", "--weight-decay", "0", "--out", str(out)])
        line = log(out)[0]
        assert line["total"] == pytest.approx(line["head" if weight == "--id-weight" else "id"], abs=1e-6)
        torch.manual_seed(0)
        start = train.new_student(**torch.load(out / "last.pt", weights_only=True)["model_args"]).state_dict()
        moved = [name for name in ("feature_cls.0.weight", "head_feature.0.weight") if not torch.equal(start[name], weights(out / "last.pt")[name])]
        assert len(moved) == 1 and still not in moved


def test_heads_without_faces_train_beside_faces_and_unreadable_pictures_are_counted(tmp_path, capsys):
    rng = np.random.default_rng(0)
    names = [f"{person}/s{state}/{frame}.png" for person in "ABCDEF" for state in range(2) for frame in range(2)]
    for name in names:
        paint(f"{tmp_path}/heads/{name}", colour=tuple(rng.integers(0, 256, 3).tolist()), size=(80, 80))
    write_landmarks(tmp_path / "heads", {name: FACE for name in names if "/s0/" in name})
    (tmp_path / "heads" / "A" / "s0" / "9.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "heads" / "B" / "s0" / "9.jpg").write_bytes(b"\xff\xd8\xff")
    train.main(["--data", str(tmp_path / "heads"), "--out", str(tmp_path / "run"), "--epochs", "2", "--steps", "4", "--teacher-epochs", "1", *SMALL])
    out = capsys.readouterr().out
    assert "faces: 12 of 26 pictures" in out and "notice: only 4 training identities" in out
    assert "unreadable pictures were left out of training" in out and "9.jpg: not a readable picture" in out
    assert all(np.isfinite(line["total"]) for line in log(tmp_path / "run"))


def test_a_folder_without_any_face_names_the_three_ways_out(tiny, tmp_path):
    with pytest.raises(ValueError, match="landmarks.csv, or use --faces DIR, or --align-weight 0"):
        train.main(["--data", tiny, "--out", str(tmp_path / "run"), *SMALL])


def test_training_goes_on_where_nothing_can_be_evaluated(tiny, tmp_path, capsys):
    train.main(["--data", tiny, "--out", str(tmp_path / "run"), "--align-weight", "0", "--epochs", "1", *SMALL])
    assert "nobody is held out" in capsys.readouterr().out and os.path.exists(tmp_path / "run" / "best.pt")


def test_an_exploding_loss_stops_the_run_and_leaves_the_checkpoints_intact(learned, toy, tmp_path):
    with pytest.raises(ValueError, match=r"stopped at step \d+: the \w+ loss is (nan|inf) \(learning rate"):
        train.main(["--data", toy, "--teacher", os.path.join(learned, "teacher.pt"), "--out", str(tmp_path / "run"), "--lr", "1e30", "--epochs", "30", "--steps", "1", *SMALL])
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run" / "last.pt").values())


@pytest.mark.parametrize("options, message", [
    (["--epochs", "0"], "--epochs must be a number from 1 to 1000000000; got 0"), (["--batch-size", "0"], "--batch-size must"), (["--lr", "nan"], "--lr must"),
    (["--fars", "2"], "false accept rate must lie in"), (["--epochs", "many"], "invalid int value: 'many'"), (["--design", "triple"], "invalid choice"),
    (["--resume", "nowhere.pt"], "no such file"), (["--resume", ""], "no such file"), (["--temperature", "0"], "--temperature must"), (["--margins", "nan", "0"], "--margins must"),
    (["--align-weight", "0", "--hier-weight", "0"], "nothing to learn"), (["--size", "50"], "multiple of patch_size"), (["--dim", "50"], "multiple of heads"),
    (["--states", "1", "--frames", "1"], "no anchor has a genuine pair"), (["--seed", "-1"], "--seed must"), (["--seed", "9" * 20], "--seed must"), (["--workers", "9" * 20], "--workers must be a number from 0 to 1000"), (["--depth", "1001"], "--depth must"), (["--teacher", ""], "no such file"), (["--init", "", "--align-weight", "0"], "no such file"), (["--teacher", "."], "a folder; expected"),
    (["--colour", "BGR"], "--colour says how"), (["--colour", "grey"], "invalid choice"), (["--teacher", __file__], "no file of weights"), (["--batch-size", "6"], "--batch-size must be at least --states x --frames x 2")])
def test_an_impossible_value_is_refused_before_anything_is_made(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        train.main(options)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--data", "missing"], ["--data", ""], ["--out", "/dev/null/run"], ["--lr", "high"]])
def test_the_command_line_says_it_in_one_line_and_exits_with_2(options, tmp_path):
    done = subprocess.run([*SCRIPT, *options], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("train.py: ")


@pytest.mark.parametrize("script", ["train.py", "evaluate.py", "teacher.py", "data.py"])
def test_help_of_every_script_shows_every_default(script):
    done = subprocess.run([sys.executable, os.path.join(ROOT, script), "--help"], capture_output=True, text=True, timeout=60)
    options = [" ".join(part.split()) for part in done.stdout.split("options:")[1].split("\n  -")[1:] if not part.startswith("h,")]
    missing = [option for option in options if "(default: " not in option and "none:" not in option and "--ckpt" not in f"-{option}"]
    assert done.returncode == 0 and not missing


def test_the_papers_table_trains_each_row_once_with_one_teacher_and_prints_means_and_ranges(toy, tmp_path, capsys):
    out = tmp_path / "table"
    options = ["--out", str(out), "--seeds", "0", "1", "--rows", "distilled", "--data", toy, "--epochs", "1", "--steps", "1", "--teacher-epochs", "1", *SMALL]
    paper_table.main(options)
    first = capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in out.glob("*/results.json")}
    assert sorted(path.parent.name for path in files) == ["distilled-0", "distilled-1", "ours-0", "ours-1"]
    assert sorted(path.parent.name for path in out.glob("*/teacher.pt")) == ["ours-0", "ours-1"]
    rows = {line.split(" | ")[0]: line for line in first.splitlines() if line.startswith("|")}
    values = [log(out / f"ours-{seed}")[-1]["head_auc"] for seed in (0, 1)]
    assert f"{sum(values) / 2:.3f} ({min(values):.3f} to {max(values):.3f})" in rows["| **ours, dual-CLS**"]
    assert rows["| distilled AdaFace"].endswith("|  |") and "| teacher, whole heads" in rows and len(rows) == 6

    os.remove(out / "distilled-0" / "results.json")  # as if it had been interrupted
    paper_table.main(options)
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("distilled, seed 0: ") and again[1:] == first.splitlines()[-len(again[1:]):]
    assert again[-1] == "VR at FAR 0.001, mean (range) of the seeds 0, 1"
    assert sum(files[path] != path.stat().st_mtime_ns for path in files) == 1
    with pytest.raises(ValueError, match="were made with the options"):
        paper_table.main([*options, "--lr", "1e-3"])
    other = ["--out", str(tmp_path / "other"), "--seeds", "2", "2", "--data", toy]
    for more, message in ((["--lr", "-1"], "ours, seed 2: train.py: --lr must be a number from 1e-12 to 1e.300; got -1.0 .exit status 2;"),
                          (["--jobs", "0"], "--jobs must be a number from 1 to 1000000000; got 0"), (["--seed", "1"], "--seed is each row's own"),
                          (["--design=shared"], "--design is each row's own")):
        with pytest.raises(ValueError, match=message):
            paper_table.main([*other, *more])


def test_compile_goes_on_without_where_there_is_no_compiler_and_says_so(monkeypatch, capsys):
    def broken(function):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    train.compile_blocks(new_student(image_size=16, patch_size=8, dim=8, depth=1, heads=1), torch.device("cpu"))
    assert capsys.readouterr().out == "notice: --compile does not work here (RuntimeError); the run goes on without\n"


def test_a_resumed_run_remembers_its_best_so_that_a_worse_epoch_never_replaces_it(learned, toy, tmp_path, monkeypatch):
    scores = iter([{"identity_vr": 0.5, "head_vr": 0.5}, {"identity_vr": 0.4, "head_vr": 0.5}])
    monkeypatch.setattr(train, "score", lambda run: next(scores))
    train.main(["--data", toy, "--align-weight", "0", "--out", str(tmp_path / "run"), "--epochs", "1", "--steps", "1", "--eval-every", "1", *SMALL])
    train.main(["--resume", str(tmp_path / "run" / "last.pt"), "--epochs", "2"])
    best, last = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("best.pt", "last.pt"))
    assert (best["epoch"], best["best"], last["epoch"], last["best"]) == (1, 0.5, 2, 0.5)


def test_training_goes_on_where_held_out_people_have_no_genuine_pair(tmp_path, capsys):
    for i in range(12):
        paint(f"{tmp_path}/heads/p{i}/0.png", colour=(20 * i, 250 - 20 * i, 90))
    train.main(["--data", str(tmp_path / "heads"), "--out", str(tmp_path / "run"), "--align-weight", "0", "--epochs", "2", "--eval-every", "1", *SMALL])
    out = capsys.readouterr().out
    assert "held out, epoch 2: identity_vr n/a  identity_auc n/a  head_vr n/a  head_auc n/a" in out and "n/a: no pairs of R1 and R2" in out
    assert [line["identity_vr"] for line in log(tmp_path / "run")] == [None, None] and os.path.exists(tmp_path / "run" / "best.pt")


def test_the_number_of_unreadable_pictures_is_right_and_each_is_named_once(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for person in "ABCDEF":
        for frame in range(4):
            paint(f"{tmp_path}/heads/{person}/s{frame // 2}/{frame}.png", colour=tuple(rng.integers(0, 256, 3).tolist()))
        (tmp_path / "heads" / person / "s0" / "9.jpg").write_bytes(b"\xff\xd8\xff")
    train.main(["--data", str(tmp_path / "heads"), "--out", str(tmp_path / "run"), "--align-weight", "0", "--epochs", "3", "--steps", "6", *SMALL])
    out = capsys.readouterr().out
    named = [line for line in out.splitlines() if line.startswith("warning: left out: ")]
    trained = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["trained"]
    assert len(named) == len(set(named)) == len(trained) == 4 and "warning: 4 unreadable pictures were left out of training" in out


def test_without_a_gpu_a_run_says_device_and_precision_in_one_line_and_nothing_on_stderr(toy, tmp_path):
    options = ["--data", toy, "--out", str(tmp_path / "run"), "--align-weight", "0", "--epochs", "1", "--steps", "1", *SMALL[:-2]]
    done = subprocess.run([*SCRIPT, *options], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.splitlines().count("device: cpu, precision: float32") == 1


# ---------------------------------------------------------------- several processes

SHARES = {"dual-cls": (6, 6), "shared": (8, 4), "transreid": (12, 0)}  # design: pictures of each of two processes


def in_two_processes(rank, folder):
    """What each of two processes does: its share of a batch of 12, of each design; saves the gradients."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    train.augment, train.cover_faces = lambda heads: heads, lambda heads, share: (heads, torch.zeros(len(heads), dtype=torch.bool))
    for design, shares in SHARES.items():
        first = sum(shares[:rank])
        torch.save(gradients(design, torch.arange(first, first + shares[rank]), torch.nn.parallel.DistributedDataParallel), f"{folder}/{design}{rank}.pt")
    torch.distributed.destroy_process_group()


def gradients(design, row, parallel):
    """Gradients by name, and the loss, of the pictures `row` of one batch of 12."""
    torch.manual_seed(0)
    sizes = dict(image_size=16, patch_size=8, dim=24, depth=2, heads=2)
    student = new_student(design=design, **sizes, **({"classes": 3} if design == "transreid" else {"embed_dim": 8})).train()
    targets, has_target, heads = torch.randn(12, 8), torch.rand(12) < 0.7, torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8)
    head = heads[row] if len(row) else torch.zeros(0, 3, 0, 0, dtype=torch.uint8)
    run = types.SimpleNamespace(settings=train.parse(["--design", design, "--head-weight", "0.7"]), student=student, network=parallel(student),
                                machine=dict(device=torch.device("cpu"), dtype=None), targets=targets, has_target=has_target, label=torch.arange(3))
    total = train.losses_of(run, Batch(row, head, None, None, row // 4, row // 2, []))["total"]
    total.backward()
    return {name: parameter.grad for name, parameter in student.named_parameters()}, total.item()


def test_processes_that_share_a_batch_have_the_gradient_of_one_with_all_of_it(tmp_path, monkeypatch):
    torch.multiprocessing.spawn(in_two_processes, (str(tmp_path),), nprocs=2)
    monkeypatch.setattr(train, "augment", lambda heads: heads)
    monkeypatch.setattr(train, "cover_faces", lambda heads, share: (heads, torch.zeros(len(heads), dtype=torch.bool)))
    for design in SHARES:
        whole, loss = gradients(design, torch.arange(12), lambda student: student)
        assert loss > 0.1 and max(gradient.abs().max() for gradient in whole.values()) > 0.1
        for rank in (0, 1):
            part, part_loss = torch.load(tmp_path / f"{design}{rank}.pt")
            assert part_loss == pytest.approx(loss, abs=1e-5)
            torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)


def test_a_batch_must_hold_an_identity_for_each_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "33")
    with pytest.raises(ValueError, match="--batch-size must give each of 33 processes an identity; 128 holds 32"):
        train.parse([])


def test_ranks_take_disjoint_parts_of_one_order_of_batches():
    rows, identity, state = np.arange(60), np.arange(60) // 6, np.arange(60) // 2
    whole, *parts = (IdentitySampler(rows, identity, state, P=5, S=2, K=2, rank=rank, processes=count) for rank, count in ((0, 1), (0, 2), (1, 2)))
    assert len({len(sampler) for sampler in (whole, *parts)}) == 1
    for batch, first, second in zip(whole, *parts):
        assert sorted(first + second) == sorted(batch) and (len(first), len(second)) == (12, 8)


def test_a_run_of_two_processes_trains_and_only_the_first_prints_and_writes(learned, toy, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *SCRIPT[1:]]
    shutil.copytree(toy, tmp_path / "heads")
    trained = torch.load(os.path.join(learned, "last.pt"), weights_only=True)["trained"]
    for name in trained[:3]:
        (tmp_path / "heads" / name / "look_0" / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    run = subprocess.run([*torchrun, "--data", str(tmp_path / "heads"), "--teacher", os.path.join(learned, "teacher.pt"), "--epochs", "2", "--steps", "8",
                          "--frames", "9", "--out", str(tmp_path / "run"), *SMALL], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert ", 2 processes" in run.stdout and all(run.stdout.count(line) == 1 for line in ("student: dual-cls", "held out, epoch 2", "numbers: "))
    assert run.stdout.count("warning: left out: ") == 3 and "warning: 3 unreadable pictures were left out of training" in run.stdout
    assert [line["epoch"] for line in log(tmp_path / "run")] == [1, 2]
    rows = [json.load(open(os.path.join(folder, "results.json"), encoding="utf-8"))["table"][1] for folder in (learned, tmp_path / "run")]
    assert [row["pictures"] for row in rows] == [156, 156]
    assert rows[1]["identity"]["auc"] == pytest.approx(rows[0]["identity"]["auc"], abs=1e-5)  # of the same teacher, embedded in shares
    more = subprocess.run([*torchrun, "--resume", str(tmp_path / "run" / "last.pt"), "--epochs", "3"], capture_output=True, text=True)
    assert more.returncode == 0 and "resumed: after epoch 2 of 3" in more.stdout and len(log(tmp_path / "run")) == 3


@pytest.mark.parametrize("processes, options", [(1, []), (2, ["--align-weight", "0"]), (2, ["--align-weight", "0", "--id-weight", "0"])])
def test_torchrun_trains_alone_and_without_alignment_and_with_parameters_that_no_loss_needs(learned, toy, tmp_path, processes, options):
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", *SCRIPT[1:], "--data", toy, "--teacher", os.path.join(learned, "teacher.pt"),
                          "--epochs", "1", "--steps", "2", "--out", str(tmp_path / "run"), *options, *SMALL], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert len(log(tmp_path / "run")) == 1 and np.isfinite(log(tmp_path / "run")[0]["total"])


def test_what_only_the_first_process_hears_of_ends_all_and_is_told_once(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [*SCRIPT, "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run"), *SMALL]
    runs = [subprocess.Popen(command, env={**os.environ, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                             text=True) for rank in (0, 1)]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [2, 2] and errors[0].count("\n") == 1 and "no such folder" in errors[0] and errors[1] == ""

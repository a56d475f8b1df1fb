"""Train the student of Head Similarity (arXiv 2605.07766): distilled from a frozen AdaFace teacher, and ordered by
the Softplus hierarchical loss on both of its embeddings.

    python train.py                              # the toy world, made on first use under runs/
    python train.py --data PATH                  # your folders (layout: data.py)
    python train.py --data PATH --teacher FILE   # released AdaFace, CVLface or insightface weights
    python train.py --data PATH --init FILE      # fine-tune a student: ours, or the authors' ours_vit2cls.ckpt
    python train.py --resume runs/NAME/last.pt   # go on where a run stopped
    torchrun --nproc_per_node=4 train.py ...     # a process a GPU: one batch, shared among them

A run writes runs/NAME/: teacher.pt, last.pt (to resume), best.pt (to use), log.jsonl, results.json, gallery*.png.

The order of a run is that of main, the last function: read the settings, join the other processes, hold the run folder,
prepare (data, teacher and its targets, student, batches), then train_epochs, and evaluate.report at the end.
"""
import contextlib
import itertools
import json
import math
import os
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch

import evaluate
from data import (HeadDataset, IdentitySampler, Parser, augment, command_line, cover_faces, data_options, loader, open_data,
                  split_identities)
from losses import alignment_loss, hierarchical_loss, reid_losses
from model import DESIGNS, build, load_strictly, new_student, patch_grid, read_checkpoint, resize_pos_embed, save_checkpoint, to_unit
from teacher import (SIZES, Progress, autocast, check_finite, check_numbers, choose_device, from_all, gather, highest, join_processes,
                     load_teacher, make_optimiser, network_options, on_first, pretrain, rank_and_count, teacher_options, update, vit_sizes)

try:
    import fcntl
except ImportError:  # Windows, where no run folder is held
    fcntl = None


# ---------------------------------------------------------------- settings

LOCK = ".lock"  # in a run folder, held by the process that writes there
MAY_CHANGE = ("epochs", "eval_every", "workers", "device", "amp", "compile", "recompute", "teacher")  # on --resume; the rest is the run's own


def parse(argv=None):
    """Command line -> settings, checked before any data is read. With --resume the stored settings are the defaults."""
    parser = Parser("Train a Head Similarity student.")
    data_options(parser)
    network_options(parser)
    group = parser.add_argument_group("student and losses")
    group.add_argument("--design", choices=list(DESIGNS), default="dual-cls",
                       help="two CLS tokens (the paper's), an ablation, or the baseline TransReID, which has losses of its own")
    teacher_options(group, none="the run's own, pre-trained first")
    group.add_argument("--init", metavar="FILE", help="start from this student, ours or the authors'; none: from the teacher's trunk")
    group.add_argument("--align-weight", type=float, default=2.0, help="weight of the alignment with the teacher; 0: none")
    group.add_argument("--hier-weight", type=float, default=1.0, help="weight of the hierarchical loss")
    group.add_argument("--id-weight", type=float, default=1.0, help="weight of z_id in the hierarchical loss")
    group.add_argument("--head-weight", type=float, default=1.0, help="weight of z_head in the hierarchical loss")
    group.add_argument("--margins", type=float, nargs=2, default=[0.1, 0.1], metavar=("M12", "M23"),
                       help="R1 over R2 and R2 over R3, in cosine")
    group.add_argument("--temperature", type=float, default=0.1, help="t of the hierarchical loss, in cosine")
    group.add_argument("--aggregate", choices=["lse", "mean"], default="lse", help="the hardest pairs count most, or all alike")
    group = parser.add_argument_group("schedule")
    group.add_argument("--epochs", type=int, default=16, help="times through the training pictures")
    group.add_argument("--teacher-epochs", type=int, default=9, help="the same for a teacher that is pre-trained first")
    group.add_argument("--steps", type=int, help="steps an epoch; none: as many as show every picture about once")
    group.add_argument("--batch-size", type=int, default=128, help="pictures a step, of all processes: identities x states x frames")
    group.add_argument("--states", type=int, default=2, help="appearance states of an identity in a batch")
    group.add_argument("--frames", type=int, default=2, help="frames of a state in a batch")
    group.add_argument("--lr", type=float, help="highest learning rate, after the warm-up; none: 0.3 / dim, or 0.03 / dim with --init")
    group.add_argument("--weight-decay", type=float, default=0.05, help="AdamW's, on matrices only")
    group.add_argument("--compile", action="store_true", help="let torch.compile make the blocks faster, where it can")
    group.add_argument("--recompute", action="store_true", help="compute the blocks again for the gradients: less memory, a third more time")
    group = parser.add_argument_group("run")
    group.add_argument("--out", metavar="DIR", help="run folder; none: a new one, runs/<data>-<design>")
    group.add_argument("--resume", metavar="FILE",
                       help=f"go on from this last.pt with its settings, of which {', '.join(MAY_CHANGE)} may change; none: a new run")
    group.add_argument("--eval-every", type=int, default=8, help="epochs between evaluations on the held-out identities")
    group.add_argument("--fars", type=float, nargs="+", default=list(evaluate.FARS), help="false accept rates; the first chooses best.pt")
    settings = with_absolute_paths(parser.parse_args(argv))
    if settings.resume is not None:
        settings = settings_of_run(parser, argv, settings.resume)
    check(settings)
    return settings


def settings_of_run(parser, argv, path):
    """--resume: the settings stored in a last.pt, with those of MAY_CHANGE that the command line changes."""
    checkpoint = read_checkpoint(path)
    stored = checkpoint["settings"]
    if not stored or not {"optimiser", "schedule", "scaler", "epoch", "step", "best", "random_states"} <= checkpoint.keys():
        raise ValueError(f"--resume goes on with a whole last.pt of this project; {path} may go with --init")
    stored = {**vars(parser.parse_args([])), **stored}  # an older version's file knows fewer settings
    parser.set_defaults(**stored)
    settings = with_absolute_paths(parser.parse_args(argv))
    changed = [name for name in stored if stored[name] != getattr(settings, name) and name not in (*MAY_CHANGE, "out", "resume")]
    if changed:
        raise ValueError(f"--resume goes on with the run's own settings; --{changed[0].replace('_', '-')} cannot change")
    if settings.out is not None:
        raise ValueError(f"--resume writes to the folder of {path}; --out goes with a new run")
    settings.out = os.path.dirname(path) or "."
    return settings


def with_absolute_paths(settings):
    """The checkpoint keeps these paths, to be found from other folders too."""
    for name in ("data", "faces", "teacher", "init"):
        if getattr(settings, name):
            setattr(settings, name, os.path.abspath(getattr(settings, name)))
    return settings


def check(settings):
    """ValueError with the rule for a value that no run can have."""
    evaluate.check_fars(settings.fars)
    check_numbers(settings, align_weight=0, hier_weight=0, id_weight=0, head_weight=0, temperature=1e-6, epochs=1, teacher_epochs=1,
                  steps=1, batch_size=2, states=1, frames=1, lr=1e-12, weight_decay=0, eval_every=1, workers=0, seed=0,
                  patch_stride=1, **dict.fromkeys(SIZES, 1))
    if not all(math.isfinite(margin) for margin in settings.margins):
        raise ValueError(f"--margins must be two finite numbers; got {settings.margins}")
    if settings.batch_size < 2 * settings.states * settings.frames:
        raise ValueError(f"--batch-size must be at least --states x --frames x 2 = {2 * settings.states * settings.frames}, "
                         f"so that a batch holds two identities; got {settings.batch_size}")
    people, processes = settings.batch_size // (settings.states * settings.frames), int(os.environ.get("WORLD_SIZE", 1))
    if people < processes:
        raise ValueError(f"--batch-size must give each of {processes} processes an identity; {settings.batch_size} holds {people}")
    if settings.states * settings.frames < 2:
        raise ValueError("--states x --frames must be at least 2: no anchor has a genuine pair otherwise")
    if settings.colour and settings.teacher is None and settings.init is None:
        raise ValueError("--colour says how the weights of --teacher were trained; there is none")
    if settings.design == "transreid":
        if settings.init is not None:
            raise ValueError("--init does not go with transreid, whose classifiers know only the people it was trained on")
    elif settings.align_weight == settings.hier_weight * max(settings.id_weight, settings.head_weight) == 0:
        raise ValueError("--align-weight is 0, and --hier-weight or both --id-weight and --head-weight: there is nothing to learn")


def open_run(settings):
    """Make the run folder, and hold it; a run that is there already is never overwritten. -> its name."""
    names = [settings.out]
    if settings.out is None:
        data = "toy" if settings.data is None else os.path.basename(os.path.abspath(settings.data))
        first = os.path.join("runs", f"{data}-{settings.design}")
        names = itertools.chain([first], (f"{first}-{i}" for i in itertools.count(2)))
        names = (name for name in names if not os.path.isdir(name) or set(os.listdir(name)) <= {LOCK})
    inputs = [os.path.realpath(path) for path in (settings.data, settings.faces) if path]
    for name in names:
        last = os.path.join(name, "last.pt")
        if not settings.resume and (os.path.exists(last) or os.path.exists(os.path.join(name, "best.pt"))):
            go_on = f"go on with --resume {last}, or " if os.path.exists(last) else ""  # a run may end before its first last.pt
            raise ValueError(f"{name} holds a run already: {go_on}choose another --out")
        if any(os.path.realpath(name).startswith(path + os.sep) for path in inputs):
            raise ValueError(f"{name} lies in the folder of the pictures, where it would become a person; choose another --out")
        os.makedirs(name, exist_ok=True)
        if hold(name):
            return name
    raise ValueError(f"{settings.out}: another run is writing to it; wait for its end, or choose another --out")


def hold(folder):
    """Hold a run folder until this process ends, however it ends, so that no two runs write to it; -> False where another holds it."""
    file = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT)  # hear now, not after an epoch, that it cannot be written to
    try:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file would let go
    except (BlockingIOError, PermissionError):
        os.close(file)
        return False
    except OSError:  # some shared file systems know no locks
        pass
    return True


# ---------------------------------------------------------------- what a run is made of

def read_start(settings):
    """-> (checkpoint of the initial student or None, teacher of --teacher or None, sizes of the student). Comes first, so
    that a wrong file or size is heard of before any data is read."""
    path = settings.init if settings.resume is None else settings.resume
    initial = None if path is None else read_checkpoint(path)
    if initial:
        build(new_student, initial, path)  # all that can be wrong with it
    if settings.init is not None and settings.teacher is None and settings.align_weight:
        settings.teacher = evaluate.teacher_of(settings.init, initial)  # what the student is aligned with; no other would do
        if settings.teacher is None:
            print("notice: no alignment, since the teacher of the student in --init is not known; add --teacher FILE", flush=True)
            settings.align_weight = 0.0
            check(settings)
    teacher = None if settings.teacher is None else load_teacher(settings.teacher, settings.colour)
    known = initial.get("teacher_description") if settings.resume is not None else None
    if teacher and known and teacher.description != known:
        raise ValueError(f"--resume needs the run's teacher, {known}; {settings.teacher} is {teacher.description}")
    return initial, teacher, student_sizes(settings, teacher, initial)


def prepare(settings, device, dtype, initial, teacher, sizes):
    """Settings and what read_start gave -> everything that a run needs: data, teacher's targets, student, batches,
    optimiser, schedule, scaler."""
    machine = dict(device=device, dtype=dtype, workers=settings.workers)
    index = on_first(open_data, settings)
    held_out = split_identities(index.names)
    train_rows, test_rows = (np.flatnonzero(part[index.identity]) for part in (~held_out, held_out))
    print(f"split: {int((~held_out).sum())} training identities, {int(held_out.sum())} held out", flush=True)

    trained = [name for name, out in zip(index.names, held_out) if not out]
    teacher, teacher_path = prepare_teacher(settings, index, ~held_out, machine, teacher, sizes)
    if settings.design == "transreid":
        sizes["classes"] = classes_of_transreid(trained, initial, index.root)
    student = make_student(settings, sizes, teacher, initial).to(device)
    if settings.compile:
        compile_blocks(student, device)
    rank, processes = rank_and_count()
    if rank:
        torch.manual_seed(settings.seed + rank)  # other augmentation in each process
    aligned = settings.align_weight > 0 and settings.design != "transreid"
    targets, has_target = teacher_targets(teacher if aligned else None, index, train_rows, student.embed_dim, machine)

    sampler = make_sampler(settings, index, train_rows)
    lr = settings.lr or (0.3 if settings.init is None else 0.03) / student.dim
    print(f"batches: {len(sampler)} an epoch, of {sampler.P} identities x {sampler.S} states x {sampler.K} frames; highest learning "
          f"rate {lr:.3g}", flush=True)
    batches = loader(HeadDataset(index, head_size=student.image_size, face_size=0), sampler, settings.workers)
    optimiser, schedule = make_optimiser(student, lr=lr, weight_decay=settings.weight_decay, steps=settings.epochs * len(sampler), warmup=200)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = SimpleNamespace(
        settings=settings, machine=machine, index=index, test_rows=test_rows, initial=initial, trained=trained,
        teacher=teacher and teacher.cpu(), teacher_path=teacher_path, targets=targets, has_target=has_target,
        label=torch.from_numpy(np.cumsum(~held_out) - 1),  # of a training identity: its number among them
        student=student,  # the ViT itself; network: the same, and its gradients are averaged over the processes
        network=student if processes == 1 else torch.nn.parallel.DistributedDataParallel(student),
        sampler=sampler, batches=batches, optimiser=optimiser, schedule=schedule, scaler=scaler,
        epoch=0, step=0, best=None, thresholds=None, unreadable=set(),
        batch=0, sums={}, counted=0, stopped=0)  # of the epoch that it is in: steps done, summed losses; the signal that stops it
    keep_trained_out(run)
    return run


def classes_of_transreid(trained, initial, root):
    """-> how many classes its classifiers have, one a training identity; to go on, they must be those of before."""
    if initial and initial["trained"] != sorted(trained):
        raise ValueError(f"the classifiers of this run know other people than the {len(trained)} that {root} has to train on now")
    print("notice: transreid has losses of its own: the options of the alignment and of the hierarchical loss do not count, and "
          "a teacher only gives its trunk")
    return len(trained)


def make_sampler(settings, index, rows):
    """-> the sampler of this process, which draws its share of every batch."""
    rank, processes = rank_and_count()
    sampler = IdentitySampler(rows, index.identity[rows], index.state[rows], P=settings.batch_size // (settings.states * settings.frames),
                              S=settings.states, K=settings.frames, seed=settings.seed, steps=settings.steps, rank=rank, processes=processes)
    for line in sampler.notices:
        print(f"notice: {line}")
    return sampler


def keep_trained_out(run):
    """Nobody whom the initial student was trained on is evaluated: after --init, or where the folder changed before --resume."""
    before, now = set(run.initial["trained"] if run.initial else ()), set(run.trained)
    new, gone = now - before, set() if run.settings.init else before - set(run.index.names)  # --init knows people of other folders
    if run.settings.resume and (new or gone):
        print(f"notice: the folder has changed: {len(new)} training identities are new, {len(gone)} are gone", flush=True)
    run.trained = sorted(before | now)
    known = np.isin(run.index.names, run.trained)[run.index.identity[run.test_rows]]
    if known.any():
        print(f"notice: {int(known.sum())} pictures are not held out, since the initial student knows people of these names")
    run.test_rows = run.test_rows[~known]


def student_sizes(settings, teacher, initial):
    """-> keyword arguments of new_student: those of the initial student, else of a ViT teacher, else the defaults
    for the data; with what the user says otherwise. ValueError for sizes that cannot be."""
    base = initial["model_args"] if initial else teacher.sizes if teacher else None
    sizes, ours = {**vit_sizes(settings, base), "design": settings.design}, settings.design != "transreid"
    if initial:
        for name, value in sizes.items():
            if name != "image_size" and value != base.get(name):
                raise ValueError(f"--init keeps the sizes of its student, but for --size: its {name} is {base.get(name)}, not {value}")
    elif ours:
        sizes["embed_dim"] = teacher.embed_dim if teacher else sizes["dim"]
    if ours and teacher and teacher.embed_dim != sizes["embed_dim"]:
        raise ValueError(f"the teacher's embedding has {teacher.embed_dim} numbers, that of the student in --init {sizes['embed_dim']}")
    with torch.device("meta"):  # no memory: only to hear now that the sizes are impossible
        new_student(**({} if ours else {"classes": 2}) | sizes)
    return sizes


def prepare_teacher(settings, index, people, machine, teacher, sizes):
    """-> (frozen teacher, its path). teacher: that of --teacher; where it is None, one of the student's sizes is pre-trained
    on the identities `people`, or, without alignment, there is none: (None, None)."""
    if teacher is None and not settings.align_weight:
        return None, None
    if settings.align_weight and not index.has_face.any():
        raise ValueError(f"{index.root} has no aligned faces to distil from: give it a landmarks.csv, or use --faces DIR, "
                         "or --align-weight 0")
    path = settings.teacher or os.path.abspath(os.path.join(settings.out, "teacher.pt"))
    if teacher is None:
        vit = {name: size for name, size in sizes.items() if name not in ("design", "classes")}
        on_first(pretrain_once, settings, path, index=index, people=people, vit=vit, **machine)
        teacher = load_teacher(path)
    print(f"teacher: {teacher.description} ({path})", flush=True)
    seen = int(np.isin(index.names, teacher.trained)[~people].sum())
    if seen:
        print(f"notice: this teacher was trained on {seen} identities of the same name as held-out ones", flush=True)
    return teacher.to(machine["device"]), path


def pretrain_once(settings, path, **how):
    """Pre-train the run's own teacher, unless a resumed run has done so."""
    if not (settings.resume and os.path.exists(path)):
        print("teacher: none given, so one is pre-trained on the training identities' aligned faces", flush=True)
        pretrain(path=path, epochs=settings.teacher_epochs, seed=settings.seed, **how)


def teacher_targets(teacher, index, rows, E, machine):
    """z_t of every training picture: (N, E) float32 and (N,) bool, True where there is one; both on the CPU.

    The teacher is frozen and always sees the same aligned face of a frame, so each embedding is computed once, here,
    and not again in every epoch."""
    has_target = torch.zeros(len(index.paths), dtype=torch.bool)
    if teacher is None:
        return torch.zeros(1, E).expand(len(index.paths), E), has_target
    print("teacher: embeds the aligned faces, once", flush=True)
    z_t, kept, unreadable = evaluate.embed_rows(teacher, index, rows[index.has_face[rows]], size=teacher.image_size,
                                                faces=True, **machine)
    for message in unreadable:
        print(f"warning: no target: {message}", flush=True)
    targets = torch.zeros(len(index.paths), E)
    if len(kept):
        targets[kept], has_target[kept] = z_t, True
    return targets, has_target


def make_student(settings, sizes, teacher, initial):
    """A new student; it starts from the initial student, or else its trunk from the teacher's where that has its shapes."""
    torch.manual_seed(settings.seed)
    student = new_student(**sizes)
    shown = ", ".join(f"{name.replace('_', ' ')} {size:g}" for name, size in student.sizes.items() if size)
    print(f"student: {settings.design}, {sum(p.numel() for p in student.parameters()) / 1e6:.1f} M parameters ({shown})")
    if initial:
        load_strictly(student, fit_positions(initial["model"], initial["model_args"], sizes), settings.resume or settings.init)
        print(f"student: starts from {settings.resume or settings.init}", flush=True)
    elif teacher and teacher.sizes:
        trunk = {name: tensor for name, tensor in teacher.state_dict().items() if not name.startswith("feature.")}
        trunk, own = fit_positions(trunk, teacher.sizes, sizes), student.state_dict()
        if settings.design == "transreid":
            trunk = student.adopt(trunk)
        fits = all(name in own and own[name].shape == tensor.shape for name, tensor in trunk.items())
        if fits and teacher.sizes["heads"] == sizes["heads"]:  # no shape tells the heads
            student.load_state_dict({**own, **trunk})
            whole = sum(name.startswith(("patch_embed.", "pos_embed", "blocks.", "norm.", "global_", "local_")) for name in own)
            print(f"student trunk: {len(trunk)} of {whole} tensors from the teacher", flush=True)
        else:
            print("student trunk: from scratch, since the teacher's has other sizes", flush=True)
    elif teacher:
        print("student trunk: from scratch, since this teacher is no ViT", flush=True)
    student.recompute = settings.recompute
    return student


def compile_blocks(student, device):
    """torch.compile for the blocks of the trunk; where it does not work, one line says so."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))  # it wants a compiler, which not every machine has
    except Exception as error:  # whatever the compiler's tool chain raises
        print(f"notice: --compile does not work here ({type(error).__name__}); the run goes on without", flush=True)
        return
    for block in student.blocks:
        block.compile()


def fit_positions(tensors, old, new):
    """Tensors of a trunk of sizes `old` -> the same for sizes `new`: another picture size is another grid of positions."""
    grids = [(patch_grid(**sizes),) * 2 for sizes in (old, new)]
    if grids[0] == grids[1] or old["patch_size"] != new["patch_size"]:
        return tensors
    print("student: position embedding resized from {0}x{0} to {1}x{1} patches".format(grids[0][0], grids[1][0]))
    return {**tensors, "pos_embed": resize_pos_embed(tensors["pos_embed"], *grids)}


# ---------------------------------------------------------------- one step, one epoch

def losses_of(run, batch):
    """One batch -> {"align", "id", "head", "total"}: scalar losses; those of TransReID: {"cross-entropy", "triplet", "total"}."""
    settings, device = run.settings, run.machine["device"]
    head, identity, state, z_t, has_target = (tensor.to(device, non_blocking=True) for tensor in (
        batch.head, batch.identity, batch.state, run.targets[batch.row], run.has_target[batch.row]))
    if len(head):
        heads, covered = cover_faces(augment(to_unit(head)), share=0.1)
    else:  # not one of this process's pictures could be read, but the others wait for its rows: none
        heads, covered = torch.zeros(0, 3, run.student.image_size, run.student.image_size, device=device), has_target  # (0,) bool
    with autocast(device, run.machine["dtype"]):
        z_id, z_head = run.network(heads, gather)                              # (B, E) each, B of all processes from here on
        identity, state, z_t, has_target = map(gather, (identity, state, z_t, has_target & ~covered))
        if settings.design == "transreid":
            features = run.student.features_of(z_id)                           # (B, 5, D)
            return reid_losses(features, run.student.logits(features), run.label.to(device)[identity])
    hierarchy = dict(m12=settings.margins[0], m23=settings.margins[1], t=settings.temperature, aggregate=settings.aggregate)
    terms = {"align": alignment_loss(z_t, z_id, has_target),
             "id": hierarchical_loss(z_id, identity, state, **hierarchy),
             "head": hierarchical_loss(z_head, identity, state, **hierarchy)}
    total = settings.align_weight * terms["align"] + settings.hier_weight * (
        settings.id_weight * terms["id"] + settings.head_weight * terms["head"])
    return {**terms, "total": total}


def train_epoch(run):
    """One epoch, or the rest of one; -> mean learning rate and loss terms, or None where a signal stopped it after a whole step."""
    run.student.train()
    run.sampler.set_epoch(run.epoch, skip=run.batch)
    epochs = run.settings.epochs
    progress = Progress(f"epoch {run.epoch + 1}/{epochs}, step", epochs * len(run.sampler), done=run.step)
    unreadable, stopped = set(), 0
    for batch in progress.watch(run.batches):
        run.step, run.batch = run.step + 1, run.batch + 1
        unreadable.update(batch.unreadable)
        if not highest(len(batch.row), run.machine["device"]):
            continue  # no process has a readable picture in this batch
        terms = losses_of(run, batch)
        lr = run.schedule.get_last_lr()[0]
        values = check_finite(terms, run.step, lr)
        update(terms["total"], run.student, run.optimiser, run.schedule, run.scaler)
        run.sums, run.counted = {name: run.sums.get(name, 0) + value for name, value in {"lr": lr, **values}.items()}, run.counted + 1
        progress.show(run.step, values, len(batch.row) * run.sampler.processes, force=run.step % len(run.sampler) == 0)
        if stopped := stopping(run):
            break
    for message in sorted(set().union(*from_all(unreadable)) - run.unreadable):
        print(f"warning: left out: {message}", flush=True)
        run.unreadable.add(message)
    if stopped:
        return None
    if not run.counted:
        raise ValueError(f"not one picture of this epoch could be read in {run.index.root}")
    means = {name: value / run.counted for name, value in run.sums.items()} | {"data_seconds": round(progress.waited, 2)}
    run.epoch, run.batch, run.sums, run.counted = run.epoch + 1, 0, {}, 0
    return means


def stopping(run):
    """-> number of the signal that stops this process or another, so that all stop after the same step; 0: none does."""
    if told := highest(run.stopped, run.machine["device"]):
        run.stopped = told
    return told


@contextlib.contextmanager
def signals_stop(run):
    """Ctrl-C and SIGTERM end the run after the step that it is in; a second one at once."""
    def stop(number, _):
        if run.stopped:
            sys.exit(128 + number)
        run.stopped = number
        if rank_and_count()[0] == 0:
            os.write(2, b"\nstopping after this step, to be resumed; once more: at once\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- evaluation, checkpoints, log

def score(run):
    """The student on the held-out identities: {"identity_vr", "identity_auc", "head_vr", "head_auc"} of z_id, and the same
    with z_head_ before it; VR at the first FAR, None where there are no pairs. Empty where nobody is held out. Sets the
    thresholds of both embeddings too."""
    index, student = run.index, run.student.eval()
    z, kept, _ = evaluate.embed_rows(lambda heads: torch.stack(student(heads), dim=1), index, run.test_rows,  # (n, 2, E)
                                     size=student.image_size, what="held out", **run.machine)
    scores, run.thresholds = on_first(rates_and_thresholds, run, z, kept) if len(kept) else ({}, None)
    return scores


def rates_and_thresholds(run, z, kept):
    """z_id and z_head (n, 2, E) of n rows -> what score returns, and the thresholds of both."""
    index, far = run.index, run.settings.fars[0]
    people = len(np.unique(index.identity[kept]))
    scores = {which: evaluate.score_embeddings(z[:, place], index.identity[kept], index.state[kept], sorted({far, evaluate.FARS[0]}))
              for place, which in enumerate(("id", "head"))}
    thresholds = {which: evaluate.calibrate(scores[which], evaluate.FARS[0], people, index.root) for which in scores}
    rates = {f"{prefix}{task}_{what}": scores[which][task]["auc"] if what == "auc" else scores[which][task]["vr"][far]
            for which, prefix in (("id", ""), ("head", "z_head_")) for task in evaluate.TASKS for what in ("vr", "auc")}
    return rates, thresholds


def evaluate_and_keep_best(run):
    """Score the student; write best.pt if the mean of z_id's two VRs is no worse than before. -> the scores, for the log."""
    scores = score(run)
    of_z_id = {name: value for name, value in scores.items() if not name.startswith("z_head_")}
    shown = "  ".join(f"{name} {evaluate.show(value)}" for name, value in of_z_id.items())
    print(f"held out, epoch {run.epoch}: {shown or 'nobody'}", flush=True)
    rates = [value for name, value in of_z_id.items() if name.endswith("_vr") and value is not None]
    mean = sum(rates) / len(rates) if rates else 0.0
    if run.best is None or mean >= run.best:
        run.best = mean
        save(run, "best.pt")
    return scores


def save(run, name):
    """Write runs/NAME/<name>: tensors and plain Python values only. last.pt also holds what --resume needs."""
    random, device = {"cpu": torch.get_rng_state()}, run.machine["device"]
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    random = from_all(random)
    settings = {key: value for key, value in vars(run.settings).items() if key not in ("resume", "out")}
    content = {
        "kind": "student", "model": run.student.state_dict(), "settings": settings, "trained": run.trained,
        "model_args": run.student.model_args,
        "teacher": run.teacher_path, "teacher_description": run.teacher and run.teacher.description,
        "root": os.path.abspath(run.index.root), "epoch": run.epoch, "best": run.best, "thresholds": run.thresholds}
    if name == "last.pt":
        content |= {
            "optimiser": run.optimiser.state_dict(), "schedule": run.schedule.state_dict(), "scaler": run.scaler.state_dict(),
            "step": run.step, "batch": run.batch, "sums": run.sums, "counted": run.counted,
            "random_states": random}
    on_first(save_checkpoint, os.path.join(run.settings.out, name), content)


def resume(run):
    """Put a run, whose student is back already, to where its last.pt was written, and its log too."""
    checkpoint, run.initial = run.initial, None
    for part in ("optimiser", "schedule", "scaler"):
        getattr(run, part).load_state_dict(checkpoint[part])
    for part in ("epoch", "step", "best", "batch", "sums", "counted"):
        setattr(run, part, checkpoint.get(part, getattr(run, part)))  # an older file was written between two epochs only
    (rank, processes), states = rank_and_count(), checkpoint["random_states"]
    if len(states) == processes:
        torch.set_rng_state(states[rank]["cpu"])
        if run.machine["device"].type == "cuda" and "cuda" in states[rank]:
            torch.cuda.set_rng_state(states[rank]["cuda"], run.machine["device"])
    else:
        print(f"notice: {processes} processes go on where {len(states)} stopped: rightly, but with other augmentation")
    log = os.path.join(run.settings.out, "log.jsonl")
    if os.path.exists(log) and rank == 0:
        with open(log, encoding="utf-8") as file:
            lines = file.readlines()[:run.epoch]  # a line an epoch; what a killed run wrote later is done again
        with open(f"{log}.tmp", "w", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(f"{log}.tmp", log)
    print(f"resumed: after epoch {run.epoch} of {run.settings.epochs}" + (f" and {run.batch} steps" if run.batch else ""), flush=True)
    if run.best is not None and not on_first(os.path.exists, os.path.join(run.settings.out, "best.pt")):
        print("notice: best.pt is gone; the student at hand is the best one until a better one comes")
        run.best = None
        evaluate_and_keep_best(run)


# ---------------------------------------------------------------- the run

def train_epochs(run):
    """All epochs that are left, until a signal stops it: train, evaluate, write a line of the log and last.pt. -> the signal, or 0."""
    settings = run.settings
    while not (stopped := stopping(run)) and run.epoch < settings.epochs:
        started, run.thresholds = time.time(), None  # thresholds are those of an evaluated epoch
        means = train_epoch(run)
        if means is not None:
            line = {"epoch": run.epoch, **means, "seconds": round(time.time() - started, 2)}
            if run.epoch % settings.eval_every == 0 or run.epoch == settings.epochs:
                line |= evaluate_and_keep_best(run)
            on_first(write_log, settings, json.dumps(line) + "\n")
        save(run, "last.pt")
    return stopped


def write_log(settings, line):
    """Add a line to log.jsonl; an empty one makes the file."""
    with open(os.path.join(settings.out, "log.jsonl"), "a" if line else "w", encoding="utf-8") as file:
        file.write(line)


def main(argv=None):
    settings = parse(argv)
    device, dtype = choose_device(settings.device, settings.amp)
    device = join_processes(device)
    rank, processes = rank_and_count()
    start = read_start(settings)
    settings.out = on_first(open_run, settings)
    precision = str(dtype or torch.float32).removeprefix("torch.")
    print(f"run folder: {settings.out}\ndevice: {device}, precision: {precision}" + f", {processes} processes" * (processes > 1), flush=True)
    run = prepare(settings, device, dtype, *start)
    if settings.resume:
        resume(run)
        if run.epoch >= settings.epochs:
            print(f"this run is finished; to train longer, on a schedule of that length, add --epochs {2 * run.epoch}")
    else:
        print("settings: " + json.dumps(vars(settings)), flush=True)
        on_first(write_log, settings, "")
        if settings.init is not None:
            evaluate_and_keep_best(run)  # the best student may be the one that it starts from
    with signals_stop(run):
        stopped = train_epochs(run)
    if stopped:
        command = "python" if processes == 1 else f"torchrun --nproc_per_node={processes}"
        print(f"stopped after step {run.step}; go on with: {command} train.py --resume {os.path.join(settings.out, 'last.pt')}")
        return 128 + stopped
    if run.unreadable:
        print(f"warning: {len(run.unreadable)} unreadable pictures were left out of training")
    best, place = os.path.join(settings.out, "best.pt"), None if rank else settings.out
    evaluate.report(evaluate.load_students({best: read_checkpoint(best)}), {"teacher": run.teacher} if run.teacher else {}, run.index,
                    run.test_rows, fars=settings.fars, **run.machine, json_file=place and os.path.join(place, "results.json"),
                    sheet=place and os.path.join(place, "gallery.png"))


if __name__ == "__main__":
    command_line(main)

"""The frozen teacher that Head Similarity (arXiv 2605.07766) distils from: released face recognition weights, or an
AdaFace-ViT pre-trained on the aligned faces of the training identities. Reading order: the networks, released files,
the parts of a training loop (train.py's too), pre-training.

    python teacher.py --data PATH [--out teacher.pt] [--margin NAME] [--decorrelate uniform|hard]
"""
import atexit
import datetime
import math
import os
import re
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from data import (HeadDataset, IdentitySampler, Parser, augment, check_outputs, command_line, data_options, loader, open_data,
                  split_identities)
from losses import AdaFace, ArcFace, CosFace, SphereFaceR, decorrelation_loss, facenet_triplet, nearest_wrong_centre
from model import (BatchNorm, VisionTransformer, build, own_checkpoint, read_weights, released_tensors, released_vit, save_checkpoint,
                   to_unit)

# option: (default in the toy world, default with --data, what it is)
SIZES = {"size": (48, 112, "side of the square input, pixels"), "patch": (8, 8, "side of a patch, pixels"),
         "dim": (96, 512, "width of a token"), "depth": (3, 24, "number of blocks"), "heads": (4, 16, "attention heads")}


# ---------------------------------------------------------------- the networks

class AdaFaceViT(VisionTransformer):
    """The released AdaFace-ViT: no CLS token, all tokens flattened into one linear layer.

    RGB faces (B, 3, S, S) float in [-1, 1] -> (B, embed_dim), not normalised: the norm tells the quality."""

    def __init__(self, *, embed_dim=None, **vit):
        super().__init__(**vit)
        D, E = self.dim, embed_dim or self.dim
        self.embed_dim = E
        self.feature = nn.Sequential(nn.Linear(self.pos_embed.shape[1] * D, D, bias=False), BatchNorm(D, eps=2e-5),
                                     nn.Linear(D, E, bias=False), BatchNorm(E, eps=2e-5))

    def forward(self, faces, maps=None, last=0):
        return self.feature(self.tokens(faces, maps, last).flatten(1))  # (B, N, D) -> (B, N * D) -> (B, E)


class Unit(nn.Module):
    """Residual unit of an IR network: BN, convolution, BN, PReLU, convolution with the stride, BN; plus the shortcut."""

    def __init__(self, before, width, *, stride, convolve):
        super().__init__()
        self.res_layer = nn.Sequential(
            nn.BatchNorm2d(before), nn.Conv2d(before, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.PReLU(width),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width))
        self.shortcut_layer = nn.MaxPool2d(1, stride) if not convolve else nn.Sequential(
            nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        return self.shortcut_layer(x) + self.res_layer(x)


class IR(nn.Module):
    """Improved residual network of ArcFace: faces (B, 3, 112, 112) float in [-1, 1] -> (B, 512), not normalised.

    units: number of units in each of the four stages. insightface's has two differences, both switched by `insightface`:
    a convolution in the very first shortcut, and weight and bias in the last batch norm."""
    image_size, embed_dim, sizes = 112, 512, None  # no sizes of a ViT

    def __init__(self, *, units, insightface=False):
        super().__init__()
        self.input_layer = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.PReLU(64))
        self.body, before = nn.Sequential(), 64
        for width, count in zip((64, 128, 256, 512), units):  # the first unit of a stage halves the picture
            self.body.append(Unit(before, width, stride=2, convolve=insightface or before != width))
            self.body.extend(Unit(width, width, stride=1, convolve=False) for _ in range(count - 1))
            before = width
        self.output_layer = nn.Sequential(nn.BatchNorm2d(512), nn.Dropout(0.4), nn.Flatten(), nn.Linear(512 * 7 * 7, 512),
                                          nn.BatchNorm1d(512, affine=insightface))

    def forward(self, faces):
        return self.output_layer(self.body(self.input_layer(faces)))  # (B, 3, 112, 112) -> (B, 512, 7, 7) -> (B, 512)


# ---------------------------------------------------------------- released files

UNITS = {8: (2, 2, 2, 2), 16: (3, 4, 6, 3), 24: (3, 4, 14, 3), 49: (3, 13, 30, 3)}  # units in all -> units a stage
REFUSED = {"keypoint_linear": "a keypoint-relative (KP-RPE) network", "rpe_": "a network with relative positions (iRPE)",
           "mobilenet.": "a Part-fViT network", "relative_position": "a Swin network", "cpb_mlp": "a Swin network"}
INSIGHTFACE = {"conv1": "input_layer.0", "bn1": "input_layer.1", "prelu": "input_layer.2",  # insightface's names -> those here
               "bn2": "output_layer.0", "fc": "output_layer.3", "features": "output_layer.4"}
INSIGHTFACE_UNIT = {"bn1": "res_layer.0", "conv1": "res_layer.1", "bn2": "res_layer.2", "prelu": "res_layer.3", "conv2": "res_layer.4",
                    "bn3": "res_layer.5", "downsample.0": "shortcut_layer.0", "downsample.1": "shortcut_layer.1"}


def load_teacher(path, colour=None):
    """Weights of a face recogniser -> frozen network in eval mode on the CPU: RGB faces (B, 3, S, S) float in [-1, 1]
    -> (B, E), not normalised. ValueError, in one line, for any other file, and for the first tensor that does not fit.

    The file's content says which it is: our own teacher.pt, official AdaFace (IR), CVLface (IR, ViT small and base) or
    insightface (iresnet). colour: the order of the channels it was trained with, "RGB" or "BGR"; None: that of the family. A
    wrong order never fails, it only makes a teacher worse; so it is in the `description`. `trained` names the identities it knows."""
    if colour not in (None, "RGB", "BGR"):
        raise ValueError(f"--colour must be RGB or BGR; got {colour!r}")
    family, usual, network, checkpoint = recognise(read_weights(path), path)
    teacher = build(network, checkpoint, path).requires_grad_(False)
    order = colour or usual
    if order is None:
        raise ValueError(f"{path}: {family} without the prefix that tells AdaFace's files (BGR) from CVLface's (RGB); "
                         "say which it was trained with: --colour BGR or --colour RGB")
    if order == "BGR":  # the first convolution, turned round, takes RGB like all others
        first = next(module for module in teacher.modules() if isinstance(module, nn.Conv2d))
        first.weight.data = first.weight.data.flip(1)
    teacher.trained, centres = checkpoint.get("trained", []), checkpoint.get("centres")
    whole = torch.is_tensor(centres) and centres.shape == (teacher.embed_dim, len(teacher.trained))
    teacher.centres = centres if whole else None  # of its margin head, (E, identities), for pretrain's init
    millions, side = sum(parameter.numel() for parameter in teacher.parameters()) / 1e6, teacher.image_size
    teacher.description = f"{family}, {millions:.1f} M parameters, {order} {side}x{side}"
    if usual and order != usual:
        teacher.description += f" (--colour; {usual} is usual for this family)"
    return teacher


def recognise(content, path):
    """What a file holds -> (family and architecture, colour order or None where nothing tells it, class of the network,
    checkpoint for `build`)."""
    if own := own_checkpoint(content, "teacher", path):
        return "own ViT", "RGB", AdaFaceViT, own
    tensors, prefix, _ = released_tensors(content, path)
    for mark, what in REFUSED.items():
        if any(mark in name for name in tensors):
            raise ValueError(f"{path}: {what}, which needs more than this project has; take a plain ViT or an IR network")
    if "cls_token" in tensors and "head_feature.0.weight" in tensors:
        raise ValueError(f"{path}: a student, not a teacher; it goes with --init, or evaluate.py --ckpt")
    if "patch_embed.proj.weight" in tensors or "pos_embed" in tensors:
        sizes = released_vit(tensors, path)
        size, dim, heads = "small" if sizes["depth"] == 12 else "base", sizes["dim"], sizes["heads"]
        family = f"CVLface ViT-{size}" if dim == 512 else f"a ViT of dim {dim}, taken to have {heads} heads"
        return family, "RGB", AdaFaceViT, {"model": tensors, "model_args": {**sizes, "embed_dim": 512}}
    insightface = any(name.startswith("layer1.") for name in tensors)
    count = len({tuple(name.split(".")[:2]) for name in tensors if name.startswith(("layer", "body."))})
    if count not in UNITS:
        raise ValueError(f"{path}: no teacher that this project knows (AdaFace or CVLface IR, CVLface ViT, insightface iresnet, its "
                         f"own teacher.pt); first tensors: {', '.join(list(tensors)[:3])}")
    depth, args = 2 * count + 2, {"units": UNITS[count], "insightface": insightface}
    if insightface:
        return f"insightface iresnet-{depth}", "RGB", IR, {"model": rename_insightface(tensors, UNITS[count], path), "model_args": args}
    family, order = ("CVLface", "RGB") if "net." in prefix else ("AdaFace", "BGR") if "model." in prefix else ("a bare", None)
    return f"{family} IR-{101 if depth == 100 else depth}", order, IR, {"model": tensors, "model_args": args}


def rename_insightface(tensors, units, path):
    """Tensors of an insightface iresnet under the names that IR gives them; ValueError for a name that it does not know."""
    parts = dict(INSIGHTFACE)
    for place, unit in enumerate(f"layer{stage}.{i}" for stage, count in enumerate(units, start=1) for i in range(count)):
        parts |= {f"{unit}.{part}": f"body.{place}.{own}" for part, own in INSIGHTFACE_UNIT.items()}
    renamed = {}
    for name, tensor in tensors.items():
        part, _, rest = name.rpartition(".")
        if part not in parts:
            raise ValueError(f"{path}: {name} is no tensor of an insightface iresnet; a variant, or another network")
        renamed[f"{parts[part]}.{rest}"] = tensor
    return renamed


# ---------------------------------------------------------------- the parts of a training loop, for train.py too

def choose_device(device="auto", amp="auto"):
    """-> (torch.device, autocast dtype or None): bf16 where the card supports it, fp16 elsewhere, float32 on a CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:1; got {device}")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: no GPU is available here")
    if amp == "fp16" and device.type == "cpu":
        raise ValueError("--amp fp16 needs a GPU; on a CPU use off or bf16")
    if amp == "auto":
        amp = "off" if device.type == "cpu" else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return device, {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]


def autocast(device, dtype):
    """The autocast of choose_device's pair: float32 where dtype is None."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_optimiser(modules, *, lr, weight_decay, steps, warmup):
    """-> (AdamW, schedule): linear warm-up, then a cosine to 0. Matrices and convolutions decay; biases, norms, CLS
    tokens and position embeddings do not."""
    decay, keep = [], []
    for name, parameter in modules.named_parameters():
        (keep if parameter.dim() < 2 or name.endswith(("cls_token", "pos_embed")) else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=decay[0].is_cuda)
    warmup = min(warmup, max(1, steps // 10))

    def factor(step):
        return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, factor)


def update(loss, modules, optimiser, schedule, scaler, clip=1.0):
    """Scale, backward, unscale, clip, step; the schedule moves only if the step happened (fp16 may skip one)."""
    optimiser.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimiser)
    nn.utils.clip_grad_norm_(modules.parameters(), clip)
    scale = scaler.get_scale()
    scaler.step(optimiser)
    scaler.update()
    if scaler.get_scale() >= scale:
        schedule.step()


def check_finite(terms, step, lr):
    """terms: {name: scalar tensor} -> {name: float}; ValueError names the first that is not finite."""
    values = dict(zip(terms, torch.stack(list(terms.values())).tolist()))  # one wait for the GPU, not one a term
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"stopped at step {step}: the {name} loss is {value} (learning rate {lr:.3g}); earlier checkpoints "
                             "are intact; try a smaller --lr")
    return values


class Progress:
    """One line of loss terms, pictures a second, share of the time spent waiting for pictures, and time left: rewritten in place on
    a terminal, else every 20 s."""

    def __init__(self, what, steps, done=0):
        self.what, self.steps, self.first, self.pictures, self.waited = what, steps, done, 0, 0.0
        self.started = self.shown = time.time()
        self.terminal = sys.stdout.isatty()

    def watch(self, batches):
        """Yield the batches of a loader, and measure how long they are waited for."""
        asked = time.time()
        for batch in batches:
            self.waited += time.time() - asked
            yield batch
            asked = time.time()

    def show(self, step, terms, pictures, force=False):
        """After a step on so many pictures: print {name: value} of its terms, if it is time to or with force."""
        self.pictures += pictures
        now = time.time()
        if not force and now - self.shown < (0.5 if self.terminal else 20):
            return
        self.shown, spent = now, now - self.started
        left = spent / max(1, step - self.first) * (self.steps - step)
        line = f"{self.what} {step}/{self.steps}  " + "  ".join(f"{name} {value:.3f}" for name, value in terms.items())
        rate = self.pictures / spent
        line += f"  {rate:.{0 if rate > 10 else 1}f} pictures/s  data {self.waited / spent:.0%}  {int(left // 60)}:{int(left % 60):02d} left"
        print(("\r\033[K" if self.terminal else "") + line, end="" if self.terminal and not force else "\n", flush=True)

    def clear(self):
        """Wipe the line off a terminal, where the work it told of is done."""
        if self.terminal:
            print("\r\033[K", end="", flush=True)


# ---------------------------------------------------------------- several processes, started by torchrun

def join_processes(device):
    """Under torchrun: meet the other processes, each on its own GPU, and leave printing to the first. -> this process's device."""
    if "RANK" not in os.environ:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(days=1))  # a teacher may be trained first
    atexit.register(dist.destroy_process_group)  # however it ends: its threads must not outlive the interpreter
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    return device


def rank_and_count():
    """-> (number of this process, how many there are); (0, 1) without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_first(function, *args, **kwargs):
    """Call a function in the first process only; -> its result, in all of them, which wait for it. Where it raises ValueError or
    OSError, they end too, and leave it to the first one to say why."""
    rank, count = rank_and_count()
    result = error = None
    if rank == 0:
        try:
            result = function(*args, **kwargs)
        except (ValueError, OSError) as raised:
            error = raised
    box = [result, error is not None]
    if count > 1:
        dist.broadcast_object_list(box)
    if error:
        raise error
    if box[1]:
        sys.exit(2)
    return box[0]


def from_all(value):
    """-> [the value in each process], in all of them."""
    values = [value] * rank_and_count()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def gather(x):
    """Rows (n, ..) of this process -> those of all processes, in the order of their ranks; n may differ.

    Every process computes the same loss of all rows, but its gradients reach its own rows only. They count as often as there
    are processes, so that the mean over the processes, which DistributedDataParallel takes, is the gradient of one process
    with all the rows."""
    rank, count = rank_and_count()
    if count == 1:
        return x
    x = x.float() if x.is_floating_point() else x
    sizes = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(x)], device=x.device))
    padded = x.new_zeros(int(max(sizes)), *x.shape[1:])
    padded[:len(x)] = x.detach()
    parts = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(parts, padded)
    parts = [part[:int(size)] for part, size in zip(parts, sizes)]
    if x.requires_grad:
        parts[rank] = x.clone()
        parts[rank].register_hook(lambda gradient: gradient * count)
    return torch.cat(parts)


def highest(number, device):
    """-> the highest of the whole numbers of all processes."""
    if rank_and_count()[1] == 1:
        return number
    number = torch.tensor(number, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


# ---------------------------------------------------------------- pre-training

MARGINS = {"adaface": AdaFace, "arcface": ArcFace, "cosface": CosFace, "sphereface-r": SphereFaceR, "triplet": None}
DEFAULT_METHOD = dict(margin="adaface", decorrelate="none", decorrelate_blocks=1, decorrelate_weight=1.0)


def make_head(margin, embed_dim, classes):
    """The margin head of a name in MARGINS, with its published values; None for triplet, which has no class centres.

    AdaFace alone, the default, has milder ones than m 0.4 and s 64, for a small network on a few thousand faces."""
    milder = dict(m=0.3, s=32.0) if margin == "adaface" else {}
    return MARGINS[margin] and MARGINS[margin](embed_dim, classes, **milder)


def teacher_losses(modules, faces, labels, method):
    """new_teacher's modules, faces (B, 3, S, S) in [-1, 1], labels (B,) -> what is minimised, and to be shown {name: scalar}.

    Attention maps are kept only here, and only with decorrelation: everything else runs the fused attention."""
    maps = None if method["decorrelate"] == "none" else []
    z = modules["network"](faces, maps, method["decorrelate_blocks"])
    if "head" in modules:
        head, logits = modules["head"], modules["head"](z, labels)
        total = F.cross_entropy(logits, labels)
        terms = {type(head).__name__: total, "accuracy": (logits.argmax(dim=1) == labels).float().mean()}
    else:
        total = facenet_triplet(z, labels)
        terms = {"triplet": total}
    if maps is not None:
        difficulty = nearest_wrong_centre(z, head.kernel, labels) if method["decorrelate"] == "hard" else None
        terms["decorrelation"] = decorrelation_loss(maps, difficulty)
        total = total + method["decorrelate_weight"] * terms["decorrelation"]
    return total, terms


def new_teacher(vit, margin, names, init=None):
    """-> ModuleDict of an AdaFaceViT and, but for triplet, its margin head for the identities `names`. init: a teacher whose weights
    go on, and its class centres of these names."""
    network = AdaFaceViT(**vit)
    head = make_head(margin, network.embed_dim, len(names))
    if init is not None:
        network.load_state_dict(init.state_dict())
    if init is not None and head and init.centres is not None:
        places = {name: place for place, name in enumerate(init.trained)}
        known = [place for place, name in enumerate(names) if name in places]
        head.kernel.data[:, known] = init.centres[:, [places[names[place]] for place in known]]
        print(f"teacher: {len(known)} of {len(names)} class centres go on too", flush=True)
    return nn.ModuleDict({"network": network, **({"head": head} if head else {})})


def pretrain(index, people, path, *, vit, epochs, seed, workers, device, dtype, batch_size=64, lr=None, init=None, method=DEFAULT_METHOD):
    """Train an AdaFaceViT on the aligned faces of the identities `people` (bool, one an identity); write it to path.

    vit: sizes of the ViT; batch_size in faces; lr None: 0.2 / dim, since wide networks want small steps, and a tenth of it with init,
    a teacher to go on from; method: margin head and decorrelation. load_teacher(path) reads the frozen teacher. -> ModuleDict of
    the network and, but for triplet, its margin head, in training mode."""
    rows = (index.has_face & people[index.identity]).nonzero()[0]
    names = [index.names[identity] for identity in sorted(set(index.identity[rows].tolist()))]
    if len(names) < 2:
        raise ValueError(f"pre-training a teacher needs aligned faces of at least 2 training identities; found {len(names)} in {index.root}")
    label = torch.tensor(np.cumsum(np.isin(index.names, names)) - 1, device=device)  # of an identity: its number among them
    torch.manual_seed(seed)
    modules = new_teacher(vit, method["margin"], names, init).to(device).train()
    network, unreadable = modules["network"], set()
    sampler = IdentitySampler(rows, index.identity[rows], index.state[rows], P=batch_size // 2, S=2, K=1, seed=seed)
    batches = loader(HeadDataset(index, head_size=0, face_size=network.image_size), sampler, workers)
    steps = epochs * len(sampler)
    optimiser, schedule = make_optimiser(modules, lr=lr or (0.2 if init is None else 0.02) / network.dim, weight_decay=0.05, steps=steps,
                                         warmup=100)
    scaler, progress = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16), Progress("teacher", steps)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(progress.watch(batches), 1 + epoch * len(sampler)):
            unreadable.update(batch.unreadable)
            if not len(batch.row):
                continue
            faces = augment(to_unit(batch.face.to(device, non_blocking=True)))
            with autocast(device, dtype):
                total, terms = teacher_losses(modules, faces, label[batch.identity.to(device)], method)
            shown = check_finite(terms, step, schedule.get_last_lr()[0])
            update(total, modules, optimiser, schedule, scaler)
            progress.show(step, shown, len(faces), force=step == steps)
    print("".join(f"warning: left out: {message}\n" for message in sorted(unreadable)), end="", flush=True)
    if not progress.pictures:
        raise ValueError(f"none of the {len(rows)} aligned faces in {index.faces or index.root} could be read")
    save_checkpoint(path, {"kind": "teacher", "model": network.state_dict(), "model_args": {**vit, "embed_dim": network.embed_dim},
                           "trained": names, "centres": modules["head"].kernel.detach() if "head" in modules else None})
    return modules


def network_options(parser):
    """Sizes, device and seed; shared with train.py."""
    group = parser.add_argument_group("network")
    for name, (toy, own, what) in SIZES.items():
        group.add_argument("--" + name, type=int, help=f"{what}; none: that of a ViT in --teacher or --init, else {toy} in the "
                           f"toy world, {own} with --data")
    group.add_argument("--patch-stride", type=int, help="pixels from one patch to the next, fewer than --patch where they overlap (what no whole "
                       "patch reaches is left out); none: --patch")
    machine_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and augmentation")


def teacher_options(parser, none):
    """Which teacher; shared by train.py and evaluate.py. none: what stands in for --teacher."""
    parser.add_argument("--teacher", metavar="FILE",
                        help=f"AdaFace, CVLface or insightface weights, or a teacher.pt of this project; none: {none}")
    parser.add_argument("--colour", type=str.upper, choices=["RGB", "BGR"],
                        help="order of the channels that the teacher was trained with; none: the usual one of its family")


def machine_options(parser):
    """Where it runs; shared with train.py and evaluate.py."""
    group = parser.add_argument_group("machine")
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun tells how many processes share them
    group.add_argument("--workers", type=int, default=min(8, max(0, cores - 2)),
                       help="processes that read pictures, for each process that trains; 0: the main one does, best on two cores")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one")
    group.add_argument("--amp", choices=["auto", "bf16", "fp16", "off"], default="auto",
                       help="mixed precision; auto: bf16 or fp16 on a GPU, off on a CPU")


def check_numbers(settings, **least):
    """Each named option must be a number of at least this much, and none that no machine can do; ValueError says which is not."""
    for name, low in least.items():
        value, high = getattr(settings, name), {"workers": 1000, "depth": 1000, "lr": 1e300}.get(name, 10 ** 9)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} must be a number from {low} to {high}; got {value}")


def vit_sizes(settings, base=None):
    """Parsed options -> keyword arguments of a VisionTransformer; what is not given comes from the sizes `base`, or else is
    the default for the data."""
    names = {**{name: name for name in SIZES}, "size": "image_size", "patch": "patch_size", "patch_stride": "patch_stride"}
    base = base or {names[name]: defaults[0 if settings.data is None else 1] for name, defaults in SIZES.items()}
    return {**base, **{names[name]: getattr(settings, name) for name in names if getattr(settings, name) is not None}}


def parse(argv):
    """Command line -> settings, checked before any data is read."""
    parser = Parser("Pre-train a teacher on the aligned faces of the training identities.")
    data_options(parser)
    network_options(parser)
    parser.add_argument("--out", metavar="FILE", default="runs/teacher.pt", help="where the teacher goes")
    parser.add_argument("--init", metavar="FILE",
                        help="go on from this teacher.pt of this project, with a tenth of the learning rate; none: from scratch")
    parser.add_argument("--epochs", type=int, default=9, help="times through the faces")
    parser.add_argument("--batch-size", type=int, default=64, help="faces a step")
    parser.add_argument("--lr", type=float, help="highest learning rate; none: 0.2 / dim, or 0.02 / dim with --init")
    group = parser.add_argument_group("method")
    group.add_argument("--margin", choices=list(MARGINS), default=DEFAULT_METHOD["margin"],
                       help="margin head with its published values (of adaface milder ones), or FaceNet's triplet loss")
    group.add_argument("--decorrelate", choices=["none", "uniform", "hard"], default="none",
                       help="ViT-HarDis: part the attention heads of all faces alike, or of hard ones more")
    group.add_argument("--decorrelate-blocks", type=int, default=DEFAULT_METHOD["decorrelate_blocks"], metavar="K", help="in the last K blocks")
    group.add_argument("--decorrelate-weight", type=float, default=DEFAULT_METHOD["decorrelate_weight"], metavar="W", help="weight of that loss")
    settings = parser.parse_args(argv)
    check_numbers(settings, epochs=1, batch_size=2, lr=1e-12, seed=0, workers=0, patch_stride=1, decorrelate_blocks=1, decorrelate_weight=0,
                  **dict.fromkeys(SIZES, 1))
    if settings.margin == "triplet" and settings.batch_size < 4:
        raise ValueError(f"--margin triplet needs two people in a batch: a --batch-size of at least 4; got {settings.batch_size}")
    if settings.margin == "triplet" and settings.decorrelate == "hard":
        raise ValueError("--decorrelate hard asks the class centres who is hard, and --margin triplet has none")
    if os.path.exists(settings.out):
        raise ValueError(f"{settings.out} exists already; choose another --out")
    return settings


def main(argv=None):
    settings = parse(argv)
    device, dtype = choose_device(settings.device, settings.amp)
    init = None if settings.init is None else load_teacher(settings.init)
    if init is not None and not isinstance(init, AdaFaceViT):
        raise ValueError(f"--init goes on from a ViT; {settings.init} is {init.description}")
    vit = vit_sizes(settings, init and init.sizes)
    if init is not None and vit != init.sizes:
        raise ValueError(f"--init keeps the sizes of its teacher, {init.sizes}; asked for {vit}")
    if init is not None:
        vit["embed_dim"] = init.embed_dim
    blocks = settings.decorrelate_blocks
    if settings.decorrelate != "none" and (blocks > vit["depth"] or vit["heads"] < 2):
        raise ValueError(f"--decorrelate needs at least 2 attention heads, and --decorrelate-blocks at most the number of blocks, "
                         f"{vit['depth']}; got {vit['heads']} and {blocks}")
    os.makedirs(os.path.dirname(settings.out) or ".", exist_ok=True)
    check_outputs([settings.out], [])
    index = open_data(settings)
    pretrain(index, ~split_identities(index.names), settings.out, vit=vit, epochs=settings.epochs, seed=settings.seed, workers=settings.workers,
             device=device, dtype=dtype, batch_size=settings.batch_size, lr=settings.lr, init=init,
             method={name: getattr(settings, name) for name in DEFAULT_METHOD})
    print(f"teacher: {settings.out}")


if __name__ == "__main__":
    command_line(main)

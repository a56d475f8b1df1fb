"""The student of Head Similarity (arXiv 2605.07766): a Vision Transformer with two CLS tokens.

Reading order: how a picture becomes the network's input, the Vision Transformer, the two tokens with their projections
(and the two ablation designs), the baseline TransReID, files of weights, checkpoints. Parameter names, ReLU6, bias-free
qkv and the epsilons are those of the released AdaFace-ViT, so that its trunk fits. This file imports none of the others.

    model, preprocess = load_model("runs/toy-dual-cls/best.pt")  # or the authors' ours_vit2cls.ckpt
    a, b = (preprocess(Image.open(name)).unsqueeze(0) for name in ("a.jpg", "b.jpg"))  # (1, 3, S, S)
    print(model.similarity(a, b))                                                      # (1,) cosine
"""
import copy
import functools
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from PIL import Image, ImageOps
from torch import nn

DESIGNS = {"dual-cls": 2, "dual-head": 1, "shared": 1, "transreid": 1}  # design -> number of CLS tokens
RELEASED_HEADS = {(12, 5): 8, (24, 3): 16}  # (depth, MLP ratio) of the released AdaFace-ViTs small and base -> attention heads


# ---------------------------------------------------------------- a picture becomes the network's input

def upright_rgb(image):
    """Any PIL picture -> 8-bit RGB, upright by its EXIF tag, 16-bit scaled, transparency on white.

    Raises ValueError for pixels without a fixed range (32-bit float or integer)."""
    if image.getexif().get(0x0112, 1) != 1:  # EXIF orientation; 1 = already upright
        image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":  # 16 and 32 bits: a plain convert("RGB") would clip all above 255 to white
        levels = np.asarray(image)
        if image.mode.startswith("I;") and getattr(image, "tag_v2", {}).get(262) == 0:  # TIFF's photometric interpretation: white is 0
            levels = 65535 - levels
        levels = np.where(levels == image.info.get("transparency", -1), 65535, levels)  # PNG's one transparent grey, on white
        if image.mode == "F" or levels.min() < 0 or levels.max() > 65535:
            raise ValueError("32-bit pixels have no fixed range; save it with 8 or 16 bits")
        eight = image.mode == "I" and levels.max() < 256  # 32-bit pixels that hold 8-bit levels
        image = Image.fromarray((levels if eight else levels >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")  # no copy where there is nothing to convert


def square_pixels(image, size):
    """PIL RGB picture -> (3, size, size) uint8 tensor; the aspect ratio is not kept, as in the authors' inference script."""
    pixels = np.array(image.resize((size, size), Image.Resampling.BILINEAR))  # (S, S, 3)
    return torch.from_numpy(pixels).permute(2, 0, 1)                          # (3, S, S)


def to_unit(pixels):
    """uint8 pixels -> float32 in [-1, 1]: (v / 255 - 0.5) / 0.5, so grey 128 becomes +0.0039."""
    return pixels.float() / 127.5 - 1


def preprocess_picture(image, size):
    """PIL picture of any mode -> (3, size, size) float32 tensor in [-1, 1]."""
    return to_unit(square_pixels(upright_rgb(image), size))


# ---------------------------------------------------------------- the Vision Transformer

def patch_grid(*, image_size, patch_size, patch_stride=None, **_):
    """Sizes of a VisionTransformer -> patches along one side. They lie side by side, or, patch_stride pixels apart, overlap."""
    return (image_size - patch_size) // (patch_stride or patch_size) + 1


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, maps=None):
        """maps: None, or a list to which the attention map (B, heads, T, T) is added; it makes the step slower."""
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)           # each (B, heads, T, D / heads)
        if maps is None:
            x = F.scaled_dot_product_attention(q, k, v)                                # scale (D / heads) ** -0.5
        else:
            maps.append((q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(dim=-1))  # (B, heads, T, T)
            x = maps[-1].to(v.dtype) @ v
        return self.proj(x.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(OrderedDict(fc1=nn.Linear(dim, hidden), act=nn.ReLU6(), fc2=nn.Linear(hidden, dim)))

    def forward(self, x, maps=None):
        x = x + self.attn(self.norm1(x), maps)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """The trunk: images (B, 3, S, S) float in [-1, 1] -> tokens after the final norm (B, num_cls + N, dim).

    N = patch_grid(...) ** 2. The CLS tokens stand first and have no position entry, so that
    `pos_embed` (1, N, dim) is the released one. The defaults are the released AdaFace-ViT base. `recompute` = True keeps what
    enters a block only and computes the rest again for the gradients: less memory, a third more time."""
    recompute = False

    def __init__(self, *, image_size=112, patch_size=8, patch_stride=None, dim=512, depth=24, heads=16, mlp_ratio=3.0, num_cls=0):
        super().__init__()
        self.sizes = dict(image_size=image_size, patch_size=patch_size, patch_stride=patch_stride, dim=dim, depth=depth, heads=heads,
                          mlp_ratio=mlp_ratio)
        if min(image_size, patch_size, dim, depth, heads, dim * mlp_ratio) < 1:
            raise ValueError(f"sizes of a ViT must be positive; got {self.sizes}")
        if patch_stride is None and image_size % patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size: {image_size} is not one of {patch_size}")
        if patch_stride is not None and not 1 <= patch_stride <= patch_size <= image_size:
            raise ValueError(f"patch_stride must be 1 to patch_size, and patch_size at most image_size; got {self.sizes}")
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads: {dim} is not one of {heads}")
        self.image_size, self.dim, self.num_cls = image_size, dim, num_cls
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Conv2d(3, dim, patch_size, stride=patch_stride or patch_size)))
        self.blocks = nn.ModuleList(Block(dim, heads, int(dim * mlp_ratio)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:
                nn.init.trunc_normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.pos_embed = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, patch_grid(**self.sizes) ** 2, dim), std=0.02))
        if num_cls:
            self.cls_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, num_cls, dim), std=0.02))

    def tokens(self, images, maps=None, last=0):
        """Images -> tokens, as above. maps: a list that gets the attention maps of the `last` blocks."""
        if images.shape[1:] != (3, self.image_size, self.image_size):
            raise ValueError(f"pictures must be (B, 3, {self.image_size}, {self.image_size}); got {tuple(images.shape)}")
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed    # (B, D, grid, grid) -> (B, N, D)
        if self.num_cls:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)        # (B, num_cls + N, D)
        for place, block in enumerate(self.blocks):
            if self.recompute and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, maps if place >= len(self.blocks) - last else None)
        return self.norm(x)

    forward = tokens


def resize_pos_embed(pos_embed, old_grid, new_grid):
    """Position embedding (1, h*w, D) for old_grid (h, w) -> (1, h'*w', D) for new_grid, bicubic."""
    if pos_embed.shape[1] != old_grid[0] * old_grid[1]:
        raise ValueError(f"pos_embed has {pos_embed.shape[1]} positions, a grid {old_grid} needs {old_grid[0] * old_grid[1]}")
    square = pos_embed.unflatten(1, old_grid).permute(0, 3, 1, 2)       # (1, D, h, w)
    square = F.interpolate(square.float(), size=new_grid, mode="bicubic", align_corners=False)
    return square.flatten(2).transpose(1, 2).to(pos_embed.dtype)        # (1, h'*w', D)


# ---------------------------------------------------------------- two CLS tokens, two projections

class BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d that uses its running statistics for a training batch of one, which has no variance."""

    def forward(self, x):
        if self.training and len(x) == 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class Embeddings(NamedTuple):
    """What the student returns, whatever its design; neither is normalised."""
    z_id: torch.Tensor    # (B, E), aligned with the teacher; used at inference
    z_head: torch.Tensor  # (B, E), the appearance-sensitive partner


class Student(VisionTransformer):
    """What all students can: forward(images) -> Embeddings, and these two. `model_args` makes one again: new_student(**model_args)."""

    def embed(self, images, which="id"):
        """Images (B, 3, S, S) in [-1, 1] -> unit rows (B, E), float32, differentiable. which: "id" or "head"."""
        if which not in ("id", "head"):
            raise ValueError(f"which must be 'id' or 'head'; got {which!r}")
        return unit_rows(getattr(self(images), "z_" + which))

    def similarity(self, a, b, which="id"):
        """Cosine similarity (B,) in [-1, 1] of heads a and b, each (B, 3, S, S) in [-1, 1]; differentiable."""
        return (self.embed(a, which) * self.embed(b, which)).sum(dim=1)


class HeadSimilarity(Student):
    """The paper's student: whole heads (B, 3, S, S) float in [-1, 1] -> Embeddings(z_id, z_head).

    design  dual-cls   token 0 = CLS_id -> g_id -> z_id, token 1 = CLS_head -> g_head -> z_head (the paper's)
            dual-head  one CLS token, read by both projections
            shared     one CLS token, one projection: z_head is z_id
    embed_dim E must be the teacher's; default: dim. All designs read CLS tokens only, so that the ablation
    compares tokens and not read-outs."""

    def __init__(self, *, design="dual-cls", embed_dim=None, **vit):
        if design not in DESIGNS or design == "transreid":
            raise ValueError(f"design must be one of {', '.join(DESIGNS)} (of which new_student makes the last); got {design!r}")
        super().__init__(num_cls=DESIGNS[design], **vit)
        D, E = self.dim, embed_dim or self.dim
        self.design, self.embed_dim, self.model_args = design, E, dict(design=design, embed_dim=E, **self.sizes)
        self.feature_cls = nn.Sequential(  # g_id
            nn.Linear(D, D, bias=False), BatchNorm(D, eps=2e-5), nn.Linear(D, E, bias=False), BatchNorm(E, eps=2e-5))
        if design != "shared":
            self.head_feature = nn.Sequential(  # g_head
                nn.Linear(D, D, bias=False), BatchNorm(D, eps=2e-5), nn.ReLU(),
                nn.Linear(D, E, bias=False), BatchNorm(E, eps=2e-5))

    def forward(self, images, gather=lambda rows: rows):
        """gather: where several processes train, what puts the rows of all together; the projections, whose batch norms want the
        whole batch, then see it in every process, and B is that of all."""
        cls = gather(self.tokens(images)[:, :self.num_cls])  # (B, num_cls, D)
        z_id = self.feature_cls(cls[:, 0])                   # (B, E)
        if self.design == "shared":
            return Embeddings(z_id, z_id)
        return Embeddings(z_id, self.head_feature(cls[:, -1]))  # the second token of two, or the only one


def unit_rows(z):
    """(B, E) -> float32 rows of length 1. Raises ValueError for a zero or non-finite row."""
    z = z.double()                                         # a square of a large or small float32 is none
    length = z.norm(dim=1, keepdim=True)                   # (B, 1)
    if not bool(((length > 0) & length.isfinite()).all()):
        raise ValueError("an embedding is zero or not finite, so it has no direction to compare")
    return (z / length).float()


# ---------------------------------------------------------------- the baseline: TransReID

class TransReID(Student):
    """TransReID (He et al., ICCV 2021), the paper's ViT baseline: one embedding, from one global and four local features.

    The last block and the norm of the trunk exist twice here: the global branch reads the CLS token over all patches, the
    local one, over a quarter of the shuffled patches, four times. Side information is left out: a head has no camera, and
    the video would give the look away. For losses.reid_losses each feature has a batch norm without bias and a classifier
    over the `classes` training identities."""
    design, PARTS = "transreid", 4

    def __init__(self, *, classes, **vit):
        super().__init__(num_cls=DESIGNS["transreid"], **vit)
        D, count = self.dim, 1 + self.PARTS
        if self.pos_embed.shape[1] < self.PARTS or classes < 2:
            raise ValueError(f"transreid needs at least {self.PARTS} patches and 2 classes; got {self.pos_embed.shape[1]} and {classes}")
        self.embed_dim, self.model_args = count * D, dict(design="transreid", classes=classes, **self.sizes)
        self.global_branch = nn.Sequential(self.blocks.pop(-1), self.norm)
        self.local_branch = copy.deepcopy(self.global_branch)
        self.norm = nn.Identity()                                           # tokens() ends before the branches
        self.neck = BatchNorm(count * D)                                    # one batch norm a feature, side by side
        self.neck.register_parameter("bias", None)
        self.classifier = nn.Parameter(nn.init.normal_(torch.empty(count, classes, D), std=0.001))

    def adopt(self, trunk):
        """Tensors of a VisionTransformer -> the same under the names here: both branches start as its last block and norm."""
        inner = {f"blocks.{len(self.blocks)}.": "0.", "norm.": "1."}        # -> places in the branches' nn.Sequential
        tensors = {name: tensor for name, tensor in trunk.items() if not name.startswith(tuple(inner))}
        for branch in ("global_branch.", "local_branch."):
            for old, new in inner.items():
                tensors |= {branch + new + name.removeprefix(old): trunk[name] for name in trunk if name.startswith(old)}
        return tensors

    def features(self, images):
        """Images (B, 3, S, S) -> (B, 5, D): the global feature, then the local ones."""
        x = self.tokens(images)                                             # (B, 1 + N, D)
        cls, patches = x[:, :1], x[:, 1:]
        length = patches.shape[1] // self.PARTS                             # as published: up to 3 patches, or one repeated, are left out
        parts = jigsaw(patches)[:, :self.PARTS * length].unflatten(1, (self.PARTS, length))  # (B, 4, N // 4, D)
        parts = torch.cat([cls[:, None].expand(-1, self.PARTS, -1, -1), parts], dim=2)       # (B, 4, 1 + N // 4, D)
        local = self.local_branch(parts.flatten(0, 1))[:, 0]                # (B * 4, D)
        return torch.cat([self.global_branch(x)[:, :1], local.unflatten(0, (-1, self.PARTS))], dim=1)

    def logits(self, features):
        """Features (B, 5, D) -> (B, 5, classes)."""
        necks = self.neck(features.flatten(1)).view_as(features)            # (B, 5, D)
        return torch.einsum("bfd,fcd->bfc", necks, self.classifier)

    def forward(self, images, gather=lambda rows: rows):
        """As published: the features before their batch norms in a row, the local ones with a quarter of the weight. gather: as in
        HeadSimilarity."""
        features = gather(self.features(images))                            # (B, 5, D)
        z = torch.cat([features[:, :1], features[:, 1:] / self.PARTS], dim=1).flatten(1)     # (B, 5 * D)
        return Embeddings(z, z)

    def features_of(self, z):
        """What forward puts in a row (B, 5 * D) -> the features again, (B, 5, D)."""
        features = z.unflatten(1, (1 + self.PARTS, -1))
        return torch.cat([features[:, :1], features[:, 1:] * self.PARTS], dim=1)


def jigsaw(patches, m=5):
    """Patch tokens (B, N, D) -> (B, N, D), each run of them now from two places of the picture; N + 1 of them where N is odd.

    As in the published code they are rotated by m - 1 (the paper says m), made even in number by the last but one, written in
    two rows and read column by column: 0 1 2 3 4 5, with m = 3, become 2 3 4 5 0 1 and then 2 5 3 0 4 1."""
    x = patches.roll(1 - m, dims=1)
    if x.shape[1] % 2:
        x = torch.cat([x, x[:, -2:-1]], dim=1)
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)            # (B, 2, N / 2, D) -> (B, N, D)


def new_student(*, design="dual-cls", **sizes):
    """The student of a design, TransReID or HeadSimilarity, not trained yet."""
    return TransReID(**sizes) if design == "transreid" else HeadSimilarity(design=design, **sizes)


# ---------------------------------------------------------------- files of weights, ours and released ones

def read_weights(path):
    """A file of weights -> what it holds, on the CPU. Nothing that stands in the file is ever executed.

    Reads what torch.save wrote and .safetensors, told apart by content. Raises ValueError with what is wrong."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: {'a folder' if os.path.isdir(path) else 'no such file'}; expected a file of weights")
    if not os.path.getsize(path):
        raise ValueError(f"{path}: empty; download or copy it again")
    start = b""
    try:
        with open(path, "rb") as file:
            start = file.read(16)
        return read_safetensors(path) if start[8:9] == b"{" else read_pickle(path)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path}: no file of weights, or a damaged one ({type(error).__name__}; it starts with {start}). Likely: half "
                         "a download, a web page or a git-lfs pointer in its place, or a file of another kind") from error


def read_safetensors(path):
    """An 8-byte length, a JSON header {name: dtype, shape, data_offsets}, and the numbers, little-endian, without a gap."""
    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
              "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        numbers = np.fromfile(file, np.uint8)
    entries = [(name, dict(entry)) for name, entry in json.loads(header, object_pairs_hook=list) if name != "__metadata__"]
    tensors, place = {}, 0
    for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (first, last) = dtypes[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if name in tensors or first != place or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} stands twice, or does not lie where it should")
        tensors[name] = torch.from_numpy(numbers[first:last]).view(dtype).view(shape)
        place = last
    if place != len(numbers):
        raise ValueError("the file ends elsewhere than its last tensor")
    return tensors


def read_pickle(path):
    """torch's own safe reader, which refuses a file with any foreign class; then TensorsOnly, which takes such classes out."""
    with warnings.catch_warnings(action="ignore"):  # about the kind of file; what matters is an error
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            if not zipfile.is_zipfile(path):
                raise
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=TensorsOnly)


class Nothing:
    """Stands for every class and function in a file that is no tensor and no plain container; does nothing."""
    __init__ = __call__ = __setitem__ = __setstate__ = append = extend = add = update = lambda self, *_, **__: None


class TensorsOnly:
    """Takes the place of the module pickle in torch.load: tensors and plain containers stay, and Nothing stands for all else,
    such as the callbacks in a Lightning file whose packages are not installed."""

    class Unpickler(pickle.Unpickler):
        known = ("collections.OrderedDict", "torch.storage.UntypedStorage", "torch._utils._rebuild_tensor_v2",
                 "torch._utils._rebuild_parameter")

        def find_class(self, module, name):
            if name == "getattr":  # a class within a class
                return lambda *_: Nothing
            return super().find_class(module, name) if f"{module}.{name}" in self.known else Nothing


def are_named_tensors(content):
    """Is it a dict of tensors by name?"""
    return isinstance(content, dict) and all(isinstance(name, str) and torch.is_tensor(tensor) for name, tensor in content.items())


def released_tensors(content, path):
    """What a released file holds -> ({name: tensor} without prefix, the prefix, names of what is dropped).

    Dropped by name: head.*, the training head's class centres, and mask_token, which only training uses."""
    tensors = content.get("state_dict", content) if isinstance(content, dict) else {}
    if not tensors or not are_named_tensors(tensors):
        found = list(content)[:3] if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: expected named tensors, bare or under state_dict; found {found}")
    kept, dropped, prefixes = {}, [], {}
    for name, tensor in tensors.items():
        prefix = re.match(r"((module|model|net)\.)*", name)[0]
        inner = name.removeprefix(prefix)
        if inner == "mask_token" or (inner.startswith("head.") and prefix in ("", "module.")):  # elsewhere head.* is a part of the network
            dropped.append(inner)
        else:
            kept[inner], prefixes[name] = tensor, prefix
    prefix = max(prefixes.values(), default="", key=len)
    strange = [name for name in prefixes if prefixes[name] != prefix]
    if strange:
        raise ValueError(f"{path}: {len(strange)} tensors lack the prefix {prefix} of the others (first: {strange[0]}): "
                         "parts of two networks?")
    if len(kept) < 5 and all(tensor.dim() < 2 or re.search(r"(kernel|weight)\w*$", name) for name, tensor in kept.items()):
        raise ValueError(f"{path}: holds a training head (class centres), not the network; give the backbone's file")
    return kept, prefix, dropped


def released_vit(tensors, path):
    """Tensors of a released AdaFace-ViT -> its sizes, keyword arguments of VisionTransformer."""
    for name, axes in {"pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.0.mlp.fc1.weight": 2}.items():
        if name not in tensors or tensors[name].dim() != axes or not tensors[name].numel():
            raise ValueError(f"{path}: no AdaFace-ViT: {name} is not there, or has another shape; another network, or a cut file")
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    dim, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    ratio = len(tensors["blocks.0.mlp.fc1.weight"]) / dim
    if (depth, ratio) not in RELEASED_HEADS:
        raise ValueError(f"{path}: no AdaFace-ViT small (12 blocks, MLP ratio 5) or base (24, 3) but one of {depth} and {ratio:g}, "
                         "whose number of attention heads is not known")
    grid, heads = math.isqrt(tensors["pos_embed"].shape[1]), RELEASED_HEADS[depth, ratio]  # no shape tells the heads
    return dict(image_size=grid * patch, patch_size=patch, dim=dim, depth=depth, heads=heads, mlp_ratio=ratio)


def load_strictly(network, tensors, path):
    """Load all tensors or none; ValueError names the first that are missing, unknown or of another shape, and a likely
    cause. A network made on the meta device takes the tensors themselves, without a second copy in memory."""
    own = network.state_dict()
    both = [name for name in own if name in tensors]
    wrong = [("without finite numbers of the right kind", [name for name in both if not has_numbers(tensors[name], own[name])],
              "a damaged file, or a training that failed"),
             ("missing", [name for name in own if name not in tensors], "only a part of the network, or a cut file"),
             ("unknown", [name for name in tensors if name not in own], "another network, or a variant of this one"),
             ("of another shape", [f"{name} {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}" for name in both
                                   if tensors[name].shape != own[name].shape], "another architecture or input size")]
    found = [f"{len(names)} {what} ({', '.join(names[:3])})" for what, names, _ in wrong if names]
    if found:
        cause = [cause for _, names, cause in wrong if names][-1]
        raise ValueError(f"{path}: its tensors do not fit the network that it describes: {'; '.join(found)}. Likely: {cause}")
    tensors = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
    network.load_state_dict(tensors, assign=any(tensor.is_meta for tensor in own.values()))


def has_numbers(tensor, wanted):
    """Does a tensor of a file hold plain, finite numbers, and counters where the network wants counters?"""
    plain = tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0
    return (plain and tensor.is_floating_point() == wanted.is_floating_point()
            and all(end.isfinite() for end in torch.aminmax(tensor.to(wanted.dtype))))  # NaN shows in both ends


# ---------------------------------------------------------------- checkpoints

def save_checkpoint(path, content):
    """Write tensors and plain Python values; a reader never sees half a file. OSError where the disk does not take it."""
    half = f"{path}.tmp"
    try:
        torch.save(content, half)
        os.replace(half, path)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(f"{path}: could not be written ({error})") from error
    finally:
        if os.path.exists(half):
            os.remove(half)


def own_checkpoint(content, kind, path):
    """What save_checkpoint wrote, kind "student" or "teacher" -> itself; None where others wrote the file.

    ValueError where it is ours, but not whole or of the other kind."""
    if not isinstance(content, dict) or "kind" not in content:
        return None
    whole = isinstance(content.get("model_args"), dict) and isinstance(content.get("trained"), list)
    if content["kind"] != kind or not whole or not are_named_tensors(content.get("model")):
        raise ValueError(f"{path}: expected a whole {kind} checkpoint of this project, found {content['kind']!r} with "
                         f"{', '.join(map(str, content))}")
    return content


def read_checkpoint(path):
    """Student checkpoint -> {"model": tensors, "model_args": .., "trained": names, ..}, on the CPU.

    The authors' ours_vit2cls.ckpt is taken as it is; it knows no "settings" and no identities. Its feature.* and
    head.* are dropped, which is said on screen: AdaFace's own embedding and class centres, of no use in a student."""
    content = read_weights(path)
    if own := own_checkpoint(content, "student", path):
        own = {"teacher": None, "settings": None, **own}
        settings, needed = own["settings"], {"data", "faces", "segment_frames", "segment_gap", "teacher", "colour"}
        if settings is not None and not (isinstance(settings, dict) and needed <= settings.keys() and "root" in own):
            raise ValueError(f"{path}: damaged: the settings of its run are not whole")
        return own
    tensors, _, dropped = released_tensors(content, path)
    if "cls_token" not in tensors or not any(name.startswith("head_feature.") for name in tensors):
        raise ValueError(f"{path}: not a student: neither a checkpoint of this project nor the authors' ours_vit2cls.ckpt "
                         f"(first tensors: {', '.join(list(tensors)[:3])})")
    student = {name: tensor for name, tensor in tensors.items() if not name.startswith("feature.")}
    dropped += tensors.keys() - student.keys()
    kinds = ", ".join(sorted({name.split(".")[0] + ".*" for name in dropped}))
    print(f"{path}: the authors' network, all {len(student)} tensors; {len(dropped)} that a student does not use are left out ({kinds})",
          flush=True)
    return {"kind": "student", "model": student, "trained": [], "teacher": None, "settings": None,
            "model_args": {"design": "dual-cls", "embed_dim": 512, **released_vit(student, path)}}


def build(network, checkpoint, path):
    """Class and checkpoint -> the network in eval mode, on the CPU. Its sizes come from the checkpoint alone."""
    try:
        with torch.device("meta"):  # no numbers yet: the file's own become the network's
            empty = network(**checkpoint["model_args"])
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{path}: damaged, or made by another version of this project ({error})") from error
    load_strictly(empty, checkpoint["model"], path)
    return empty.eval()


def load_model(path):
    """Checkpoint of a student, ours or the authors' -> (student in eval mode on the CPU, preprocess).

    preprocess: PIL picture of any mode -> (3, S, S) float32 in [-1, 1]."""
    model = build(new_student, read_checkpoint(path), path)
    return model, functools.partial(preprocess_picture, size=model.image_size)

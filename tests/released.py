"""Stand-ins for released weights, which no test can download: deterministic numbers under the released names, and what
the published network definitions return for them (eval mode, seed 0)."""
import json
import math
import zlib

import numpy as np
import torch

from model import HeadSimilarity
from teacher import IR, UNITS, AdaFaceViT

SMALL_VIT, BASE_VIT = dict(depth=12, heads=8, mlp_ratio=5.0), {}

# network -> for each of four pictures the length of its embedding, and the first 8 numbers of the unit embedding, times 1e5
REFERENCE = {
    "CVLface ViT-small": [
        (26.1211, [-5164, -2076, 5644, -1535, 6017, 5290, -81, -772]),
        (27.2345, [-2441, -526, 2832, -1593, 6064, 4777, -922, -4415]),
        (25.5926, [-3335, -3002, 6838, -2607, 5001, 1772, -198, -1976]),
        (26.004, [-4421, -1818, 4920, -3220, 5474, 4700, 1724, 1077])],
    "CVLface ViT-base": [
        (24.3933, [-2257, 1172, -9181, 5889, 7201, -2528, -1709, -3709]),
        (24.2582, [-816, 409, -8963, 5690, 7122, -7185, -2604, -3687]),
        (24.0119, [-1285, 1148, -6540, 4914, 9221, -6075, -2050, -2173]),
        (25.2108, [-2532, -2104, -7266, 6652, 5568, -7133, -2294, -3279])],
    "AdaFace IR-18": [
        (798.3051, [1736, 421, -2574, 5381, -680, -6829, 9147, 2601]),
        (943.3412, [6720, -7874, 8378, 4991, -3510, -4722, 5362, -8671]),
        (910.1709, [1519, 1585, 838, 3658, 487, 746, -398, 4348]),
        (941.7364, [-1476, -3239, -8196, -3695, -7654, -608, 4338, -3160])],
    "AdaFace IR-50": [
        (1302025.25, [-3705, -7398, -4167, -9440, 785, -2577, -6581, -1086]),
        (1628964.0, [-4263, 4427, 2229, 5451, -332, 1868, -1511, -1925]),
        (1419068.125, [-2849, -2431, 4240, -1813, -430, -3378, -372, 7388]),
        (1603496.375, [-2632, -2218, 7039, -3583, 2564, 1605, -364, 947])],
    "insightface iresnet-18": [
        (808.6052, [508, 3206, -1388, 4277, 3287, 5804, 1713, 3364]),
        (941.8375, [1889, -4821, 3767, -990, 1681, -3774, 2455, -2782]),
        (830.8208, [-3675, 4158, 1383, -5842, -8623, -3663, 408, -4534]),
        (907.3909, [-3738, -4336, 6571, -3478, 1911, -589, -5675, -708])],
    "z_id": [
        (24.3924, [2724, -1204, -7752, 1727, 5984, 1160, -435, -6335]),
        (24.597, [2547, 496, -7443, 381, 5784, 587, -1692, -6167]),
        (25.5846, [2417, -3541, -7407, 1025, 4257, -1642, 44, -5506]),
        (24.3334, [380, 602, -7801, 514, 6881, 873, -238, -6880])],
    "z_head": [
        (17.7703, [-6448, -3288, 7189, -2688, 6024, 5213, 1979, 316]),
        (17.3078, [-8205, -4349, 6541, -2492, 4495, 5604, 79, -611]),
        (17.6517, [-6097, -4821, 8256, -3455, 7095, 4467, -435, -2723]),
        (17.3241, [-8280, -3975, 5734, -3518, 6321, 4804, 1961, 875])]}


def agrees(z, name):
    """Are embeddings (4, 512) of the four pictures those of the published definition?"""
    length = z.norm(dim=1)
    lengths, first = zip(*REFERENCE[name])
    return (torch.allclose(length, torch.tensor(lengths), rtol=1e-3)
            and torch.allclose((z / length[:, None])[:, :8], torch.tensor(first) / 1e5, atol=2e-4, rtol=0))


def pictures():
    """Four 112x112 RGB pictures of coloured blocks -> (4, 3, 112, 112) float in [-1, 1]."""
    blocks = np.random.default_rng(0).integers(0, 256, (4, 7, 7, 3))
    pixels = np.kron(blocks, np.ones((1, 16, 16, 1)))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def number(key, tensor, seed):
    """The deterministic content of one entry of a state dict, from its full key and its shape."""
    if tensor.dtype == torch.int64:
        return torch.zeros(tensor.shape, dtype=torch.int64)
    r = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode()) ^ seed))
    if key.endswith("running_var"):
        return 0.5 + 0.25 * r.abs()
    if key.endswith(("running_mean", "bias")):
        return 0.02 * r
    if tensor.dim() == 1:
        return 0.9 + 0.1 * r
    return 0.5 * r if key.endswith("pos_embed") else r / math.sqrt(tensor[0].numel())


def fill(network, prefix="", rename=str, seed=0, **sizes):
    """Class of a network -> the state dict of a released file: {prefix + name: deterministic numbers}."""
    with torch.device("meta"):
        entries = network(**sizes).state_dict()
    return {prefix + rename(name): number(prefix + rename(name), tensor, seed) for name, tensor in entries.items()}


def vit(prefix="net.", **sizes):
    return fill(AdaFaceViT, prefix, embed_dim=512, **sizes)


def ir(units, prefix="model."):
    return fill(IR, prefix, units=UNITS[units])


def iresnet(units):
    """insightface's names, written as its documentation does."""
    stem = {"input_layer.0": "conv1", "input_layer.1": "bn1", "input_layer.2": "prelu", "output_layer.0": "bn2", "output_layer.3": "fc",
            "output_layer.4": "features"}
    unit = {"res_layer.0": "bn1", "res_layer.1": "conv1", "res_layer.2": "bn2", "res_layer.3": "prelu", "res_layer.4": "conv2",
            "res_layer.5": "bn3", "shortcut_layer.0": "downsample.0", "shortcut_layer.1": "downsample.1"}
    layers = [f"layer{stage}.{i}" for stage, count in enumerate(UNITS[units], 1) for i in range(count)]

    def rename(name):
        part, rest = name.rsplit(".", 1)
        if part.startswith("body."):
            _, n, part = part.split(".", 2)
            return f"{layers[int(n)]}.{unit[part]}.{rest}"
        return f"{stem[part]}.{rest}"

    return fill(IR, rename=rename, units=UNITS[units], insightface=True)


def authors(**sizes):
    """The authors' Head Similarity network, with the embedding of AdaFace that is left in their file."""
    return {**fill(HeadSimilarity, "model.", embed_dim=512, **sizes),
            **{name: tensor for name, tensor in vit("model.", **sizes).items() if name.startswith("model.feature.")}}


def write_safetensors(path, tensors):
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        dtype = {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, start := start + tensor.nbytes]}
    header = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(tensor.contiguous().numpy().tobytes())

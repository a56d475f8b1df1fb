"""How fast is a training step of our ViT? Beside timm's ViT of the same shape, where timm is installed, and a plain attention.

    python tests/bench_model.py                                                  # CPU, float32, a minute or two
    python tests/bench_model.py --device cuda --amp bf16 --base --batch-size 256 [--compile] [--recompute] [--peak TFLOPS]

A step is forward, backward and AdamW. The three take turns, so that what else the machine does meets all alike; printed are pictures
a second, and the median over the rounds of the time of a step beside ours. `plain` is our network with the attention map written out
(softmax of q k^T). With --peak, the card's peak in TFLOP/s for the type of number, the share of it that the arithmetic of a step takes.
"""
import os
import statistics
import sys
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from data import Parser, command_line
from model import VisionTransformer
from teacher import autocast, choose_device, make_optimiser, update

SHAPE = dict(image_size=112, patch_size=8, dim=384, depth=6, heads=6, mlp_ratio=3.0)
BASE = dict(SHAPE, dim=512, depth=24, heads=16)


class Plain(VisionTransformer):
    """Our ViT with every attention map written out."""

    def forward(self, images):
        return self.tokens(images, maps=[], last=len(self.blocks))


def timm_vit(*, image_size, patch_size, dim, depth, heads, mlp_ratio):
    """timm's ViT of the same shape, whose forward_features gives the tokens after the norm; None without timm."""
    try:
        from timm.models.vision_transformer import VisionTransformer as TimmViT
    except ImportError:
        return None
    network = TimmViT(image_size, patch_size, embed_dim=dim, depth=depth, num_heads=heads, mlp_ratio=mlp_ratio, qkv_bias=False, num_classes=0,
                      act_layer=torch.nn.ReLU6)
    network.forward = network.forward_features
    return network


def operations(network, *, dim, depth, mlp_ratio, **_):
    """Floating-point operations of forward and backward for one picture: two a weight and token, and the attention; times three."""
    tokens = network.pos_embed.shape[1] + 1
    return 3 * depth * (2 * tokens * dim * dim * (4 + 2 * mlp_ratio) + 4 * tokens ** 2 * dim)


def main(argv=None):
    parser = Parser("Time a training step of our ViT beside others.")
    parser.add_argument("--base", action="store_true", help="the shape of the ViT-base, for a GPU")
    parser.add_argument("--batch-size", type=int, default=16, help="pictures a step")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each network")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto: a GPU where there is one")
    parser.add_argument("--amp", choices=["auto", "bf16", "fp16", "off"], default="auto", help="mixed precision")
    parser.add_argument("--compile", action="store_true", help="torch.compile for the blocks of ours and timm's")
    parser.add_argument("--recompute", action="store_true", help="ours computes its blocks again for the gradients")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="the card's peak; none: no share is printed")
    settings = parser.parse_args(argv)
    device, dtype = choose_device(settings.device, settings.amp)
    shape = BASE if settings.base else SHAPE
    networks = {"ours": VisionTransformer(num_cls=1, **shape), "timm": timm_vit(**shape), "plain": Plain(num_cls=1, **shape)}
    if networks["timm"] is None:
        print("timm is not installed (pip install timm): left out")
        del networks["timm"]
    networks["ours"].recompute = settings.recompute
    steps = {}
    for name, network in networks.items():
        if settings.compile and name != "plain":
            for block in network.blocks:
                block.compile()
        steps[name] = make_step(network.to(device).train(), settings.batch_size, shape["image_size"], device, dtype)
    seconds = {name: [] for name in steps}
    for turn in range(1 + settings.rounds):  # the first warms up
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(settings.steps):
                step()
            seconds[name] += [(time.perf_counter() - started) / settings.steps] if turn else []
    print(f"{shape}, batches of {settings.batch_size}, {device}, {dtype or torch.float32}")
    for name, times in seconds.items():
        rate, ratio = settings.batch_size / statistics.median(times), statistics.median(t / o for t, o in zip(times, seconds["ours"]))
        share = f"  {rate * operations(networks['ours'], **shape) / settings.peak / 1e12:.0%} of the peak" if settings.peak else ""
        print(f"{name:6} {rate:9.1f} pictures/s  {ratio:.3f} times the step of ours{share}")


def make_step(network, B, side, device, dtype):
    """-> function without arguments that trains the network on one batch of noise and waits for it."""
    optimiser, schedule = make_optimiser(network, lr=1e-4, weight_decay=0.05, steps=10 ** 6, warmup=1)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    images = torch.rand(B, 3, side, side, device=device) * 2 - 1

    def step():
        with autocast(device, dtype):
            tokens = network(images)                                            # (B, 1 + N, D)
        loss = tokens[:, 0].float().square().mean()
        update(loss, network, optimiser, schedule, scaler)
        loss.item()

    return step


if __name__ == "__main__":
    command_line(main)

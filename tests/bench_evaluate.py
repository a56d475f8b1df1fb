"""How fast is evaluate.score_embeddings, and how much memory does it take, at the scale of real benchmarks?

    python tests/bench_evaluate.py                                # 20,000 embeddings, 200 million pairs
    python tests/bench_evaluate.py --pictures 50000 --no-dense    # 1.25 thousand million pairs
    python tests/bench_evaluate.py --people 1 --no-dense          # all pairs genuine

The floor is the bare matrix product of the tiles on and above the diagonal: no exact evaluation can do without it. In a
profile of 200 million pairs on two cores (4.1 s in all) the product took 41 % of the time, counting by score 23 % (one thread,
random access to counters larger than the cache), finding the pairs above the watched thresholds 16 %; rounding, the
sample, the sums over counters and the bootstrap share the rest.
"""
import argparse
import os
import resource
import sys
import time

import numpy as np
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from evaluate import score_embeddings, verification
from model import unit_rows


def bare_product(z, tile=1024):
    for i in range(0, len(z), tile):
        for j in range(i, len(z), tile):
            z[i:i + tile] @ z[j:j + tile].T


def dense_and_sorted(z, identity, state):
    """The whole matrix, its upper triangle by relation, verification by sorting."""
    s = (z @ z.T).numpy()
    upper = np.triu(np.ones(s.shape, dtype=bool), 1)
    person, look = identity[:, None] == identity, state[:, None] == state
    r1, r2, r3 = s[upper & look], s[upper & person & ~look], s[upper & ~person]
    return [verification(np.concatenate([r1, r2]), r3), verification(r1, np.concatenate([r2, r3]))]


def seconds(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=20000)
    parser.add_argument("--people", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-dense", action="store_true", help="leave out the dense matrix, which takes 40 bytes a pair")
    settings = parser.parse_args()
    rng, N = np.random.default_rng(0), settings.pictures
    identity = np.arange(N) * settings.people // N
    state = identity * 5 + np.arange(N) % 5
    z = torch.from_numpy(rng.standard_normal((N, 512), dtype=np.float32))
    z += torch.from_numpy(rng.standard_normal((settings.people, 512), dtype=np.float32) * 0.7)[identity]
    z = unit_rows(z + torch.from_numpy(rng.standard_normal((5 * settings.people, 512), dtype=np.float32) * 0.7)[state])
    print(f"{N} embeddings of 512, {settings.people} identities, {N * (N - 1) // 2} pairs, {torch.get_num_threads()} threads")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(settings.repeats):
        floor, _ = seconds(bare_product, z)
        ours, result = seconds(score_embeddings, z, identity, state)
        print(f"bare product {floor:.2f} s, score_embeddings {ours:.2f} s: {ours / floor:.2f} times", flush=True)
    print(f"growth of peak memory: {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:.0f} MB")
    if not settings.no_dense:
        dense, expected = seconds(dense_and_sorted, z, identity, state)
        print(f"dense and sorted {dense:.2f} s: {dense / ours:.1f} times as long as score_embeddings")
        for task, other in zip(("identity", "head"), expected):
            print(f"{task}: VR {result[task]['vr']} and {other['vr']}, AUC differs by {abs(result[task]['auc'] - other['auc']):.1e}")


if __name__ == "__main__":
    main()

"""Every row of the paper's tables in the toy world: train it with each seed, print one Markdown table of means and ranges.

    python tests/paper_table.py [--seeds 0 1 2] [--out runs/table] [--jobs N] [--rows NAME ...] [options of train.py]

Rows that are done are not run again, and one that was interrupted goes on: start the same command once more. The first row
is the default run, which pre-trains a teacher; the other rows with the same seed share it. The figures are those of the
held-out people at the best epoch, z_id's but for the last column. OUT/table.json holds them a seed.
"""
import concurrent.futures
import json
import os
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)
from data import TOY_WORLD, Parser, command_line, make_toy

ROWS = {  # name of the folder: (name in the table, options of train.py)
    "ours": ("**ours, dual-CLS**", []),
    "distilled": ("distilled AdaFace", ["--hier-weight", "0"]),
    "transreid": ("TransReID-ViT", ["--design", "transreid"]),
    "dual-head": ("ablation: dual-head", ["--design", "dual-head"]),
    "shared": ("ablation: shared", ["--design", "shared"]),
    "no-alignment": ("ours without alignment", ["--align-weight", "0"]),
    "z_id-only": ("ours, hierarchical loss on z_id only", ["--head-weight", "0"]),
    "z_head-only": ("ours, hierarchical loss on z_head only", ["--id-weight", "0"])}
FIGURES = {"identity_vr": "identity VR@FAR", "identity_auc": "AUC", "head_vr": "head similarity VR@FAR", "head_auc": "AUC",
           "z_head_head_vr": "head similarity VR of z_head"}
WITHOUT_Z_HEAD = ("distilled", "z_id-only")  # rows that never train it


def train(row, seed, settings, options):
    """Run train.py for one row and seed, unless it is done; ValueError with the end of its log where it fails."""
    folder = os.path.join(settings.out, f"{row}-{seed}")
    if os.path.exists(os.path.join(folder, "results.json")):
        return
    last = os.path.join(folder, "last.pt")
    command = ["--resume", last] if os.path.exists(last) else [*options, *ROWS[row][1], "--seed", str(seed), "--out", folder]
    if row != "ours" and not os.path.exists(last):
        command += ["--teacher", os.path.join(settings.out, f"ours-{seed}", "teacher.pt")]
    threads = max(1, (os.cpu_count() or 1) // settings.jobs)
    started = time.time()
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        status = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *command], stdout=log, stderr=subprocess.STDOUT,
                                env={**os.environ, "OMP_NUM_THREADS": str(threads)}).returncode
    if status:
        with open(f"{folder}.log", encoding="utf-8") as log:
            raise ValueError(f"{row}, seed {seed}: {log.read().strip().splitlines()[-1]} (all of it: {folder}.log)")
    print(f"{row}, seed {seed}: {(time.time() - started) / 60:.1f} minutes", flush=True)


def figures(row, seed, settings):
    """-> {name: value} of the best epoch's line in a run's log."""
    with open(os.path.join(settings.out, f"{row}-{seed}", "log.jsonl"), encoding="utf-8") as file:
        lines = [line for line in map(json.loads, file) if line.get("identity_vr") is not None]
    best = max(lines, key=lambda line: (line["identity_vr"] + (line["head_vr"] or 0), line["epoch"]))
    return {name: best[name] for name in FIGURES if not (name.startswith("z_head") and row in WITHOUT_Z_HEAD)}


def teacher_figures(seed, settings):
    """-> {"teacher, aligned faces": {name: value}, "teacher, whole heads": ..} from the results of the first row."""
    with open(os.path.join(settings.out, f"ours-{seed}", "results.json"), encoding="utf-8") as file:
        results = json.load(file)
    far, values = str(results["fars"][0]), {}
    for row in results["table"]:
        if row["name"].startswith("teacher"):
            values[row["name"]] = {f"{task}_{what}": row[task]["auc"] if what == "auc" else row[task]["vr"][far]
                                   for task in ("identity", "head") for what in ("vr", "auc")}
    return values


def print_markdown(table):
    """{row: [{name: value} a seed]} -> Markdown, each cell the mean and, of several seeds, the range."""
    print("| | " + " | ".join(FIGURES.values()) + " |\n|" + "---|" * (1 + len(FIGURES)))
    for row, seeds in table.items():
        cells = []
        for name in FIGURES:
            values = [figures[name] for figures in seeds if figures.get(name) is not None]
            spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            cells.append(f"{sum(values) / len(values):.3f}{spread}" if values else "")
        print(f"| {row} | " + " | ".join(cells) + " |")


def main(argv=None):
    parser = Parser("Train every row of the paper's tables; options not named here go to train.py.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="each row is trained with each of them")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="which; the first is always trained")
    parser.add_argument("--out", metavar="DIR", default="runs/table", help="where the runs and table.json go")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, sharing the processors")
    settings, options = parser.parse_known_args(argv)
    os.makedirs(settings.out, exist_ok=True)
    if "--data" not in options and not os.path.isdir(TOY_WORLD):
        make_toy(TOY_WORLD)  # before several runs do so at once
    others = [row for row in settings.rows if row != "ours"]
    with concurrent.futures.ThreadPoolExecutor(settings.jobs) as pool:
        for rows in (["ours"], others):
            runs = [pool.submit(train, row, seed, settings, options) for seed in settings.seeds for row in rows]
            for run in concurrent.futures.as_completed(runs):
                run.result()
    teachers = [teacher_figures(seed, settings) for seed in settings.seeds]
    table = {name: [teacher[name] for teacher in teachers] for name in teachers[0]}
    table |= {ROWS[row][0]: [figures(row, seed, settings) for seed in settings.seeds] for row in ["ours", *others]}
    print_markdown(table)
    with open(os.path.join(settings.out, "table.json"), "w", encoding="utf-8") as file:
        json.dump({"seeds": settings.seeds, "options": options, "table": table}, file, indent=1)


if __name__ == "__main__":
    command_line(main)

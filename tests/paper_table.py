"""Every row of the paper's tables in the toy world: train it with each seed, print one Markdown table of means and ranges.

    python tests/paper_table.py [--seeds 0 1 2] [--out runs/table] [--jobs N] [--rows NAME ...] [options of train.py]

Rows that are done are not run again, and one that was interrupted goes on: start the same command once more. The first row
pre-trains a teacher unless --teacher names one; the other rows with the same seed share it. The figures are those of the
held-out people at the best epoch, z_id's but for the last column. OUT/table.json holds those of the rows asked for, a seed.
"""
import concurrent.futures
import glob
import json
import os
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)
from data import TOY_WORLD, Parser, command_line, make_toy
from evaluate import write_json
from teacher import check_numbers

ROWS = {  # name of the folder: (name in the table, options of train.py)
    "ours": ("**ours, dual-CLS**", []),
    "distilled": ("distilled AdaFace", ["--hier-weight", "0"]),
    "transreid": ("TransReID-ViT", ["--design", "transreid"]),
    "dual-head": ("ablation: dual-head", ["--design", "dual-head"]),
    "shared": ("ablation: shared", ["--design", "shared"]),
    "no-alignment": ("ours without alignment", ["--align-weight", "0"]),
    "z_id-only": ("ours, hierarchical loss on z_id only", ["--head-weight", "0"]),
    "z_head-only": ("ours, hierarchical loss on z_head only", ["--id-weight", "0"])}
FIGURES = {"identity_vr": "identity VR", "identity_auc": "AUC", "head_vr": "head similarity VR", "head_auc": "AUC",
           "z_head_head_vr": "head similarity VR of z_head"}
WITHOUT_Z_HEAD = ("distilled", "z_id-only", "shared", "transreid")  # rows that never train it, or have none of its own
OF_A_ROW = ("--design", "--hier-weight", "--id-weight", "--head-weight", "--seed", "--init", "--resume")  # what makes a row


def train(row, seed, settings, options):
    """Run train.py for one row and seed, unless it is done; ValueError with the end of its log where it fails."""
    folder = os.path.join(settings.out, f"{row}-{seed}")
    if os.path.exists(os.path.join(folder, "results.json")):
        return
    last = os.path.join(folder, "last.pt")
    command = [*options, *ROWS[row][1], "--seed", str(seed), "--out", folder]
    if row != "ours" and "--teacher" not in named(options):
        command += ["--teacher", os.path.join(settings.out, f"ours-{seed}", "teacher.pt")]
    if os.path.exists(last):
        command = ["--resume", last]
    threads = max(1, (os.cpu_count() or 1) // settings.jobs)
    started = time.time()
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        status = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *command], stdout=log, stderr=subprocess.STDOUT,
                                env={**os.environ, "OMP_NUM_THREADS": str(threads)}).returncode
    if status:
        with open(f"{folder}.log", encoding="utf-8") as log:
            lines = log.read().strip().splitlines() or ["no output"]
        raise ValueError(f"{row}, seed {seed}: {lines[-1]} (exit status {status}; all of it: {folder}.log)")
    print(f"{row}, seed {seed}: {(time.time() - started) / 60:.1f} minutes", flush=True)


def figures(row, seed, settings):
    """-> {name: value} of the best epoch's line in a run's log."""
    path = os.path.join(settings.out, f"{row}-{seed}", "log.jsonl")
    with open(path, encoding="utf-8") as file:
        lines = [line for line in map(json.loads, file) if line.get("identity_vr") is not None]
    if not lines:
        raise ValueError(f"{path} has no figures: no two pictures of one held-out person; give --data more people")
    best = max(lines, key=lambda line: (line["identity_vr"] + (line["head_vr"] or 0), line["epoch"]))
    return {name: best[name] for name in FIGURES if not (name.startswith("z_head") and row in WITHOUT_Z_HEAD)}


def results_of(seed, settings):
    """What the first row's evaluation wrote."""
    with open(os.path.join(settings.out, f"ours-{seed}", "results.json"), encoding="utf-8") as file:
        return json.load(file)


def teacher_figures(results):
    """-> {"teacher, aligned faces": {name: value}, "teacher, whole heads": ..} from the results of a first row."""
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


def named(options):
    """The names among options of train.py: --lr=1 counts as --lr."""
    return [option.split("=")[0] for option in options]


def parse(argv):
    """Command line -> settings, options of train.py, which --out keeps. ValueError for options that no table can have, or that
    differ from those which the folder's runs were made with."""
    parser = Parser("Train every row of the paper's tables; options not named here go to train.py.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="each row is trained with each of them")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="which; the first is always trained")
    parser.add_argument("--out", metavar="DIR", default="runs/table", help="where the runs and table.json go")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, sharing the processors; on a GPU take 1")
    settings, options = parser.parse_known_args(argv)
    check_numbers(settings, jobs=1)
    settings.seeds, settings.rows = (list(dict.fromkeys(values)) for values in (settings.seeds, settings.rows))
    if taken := [name for name in named(options) if name in OF_A_ROW]:
        raise ValueError(f"{taken[0]} is each row's own: choose with --rows, --seeds and --out")
    stored = os.path.join(settings.out, "options.json")
    if os.path.exists(stored) and glob.glob(os.path.join(settings.out, "*", "last.pt")):
        with open(stored, encoding="utf-8") as file:
            before = json.load(file)
        if before != options:
            raise ValueError(f"the runs in {settings.out} were made with the options {before}, not {options}: choose another --out")
    os.makedirs(settings.out, exist_ok=True)
    write_json(stored, options)
    return settings, options


def main(argv=None):
    settings, options = parse(argv)
    if "--data" not in named(options) and not os.path.isdir(TOY_WORLD):
        make_toy(TOY_WORLD)  # before several runs do so at once
    others = [row for row in settings.rows if row != "ours"]
    pool = concurrent.futures.ThreadPoolExecutor(settings.jobs)
    try:
        for rows in (["ours"], others):
            runs = [pool.submit(train, row, seed, settings, options) for seed in settings.seeds for row in rows]
            for run in concurrent.futures.as_completed(runs):
                run.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C or a failed row no other one starts
    results = [results_of(seed, settings) for seed in settings.seeds]
    teachers = [teacher_figures(result) for result in results]
    table = {name: [teacher[name] for teacher in teachers] for name in teachers[0]}
    table |= {ROWS[row][0]: [figures(row, seed, settings) for seed in settings.seeds] for row in ["ours", *others]}
    print_markdown(table)
    far = results[0]["fars"][0]
    print(f"\nVR at FAR {far:g}, mean (range) of the seeds {', '.join(map(str, settings.seeds))}")
    student = next(row for row in results[0]["table"] if row["name"] == "student, whole heads")
    if not all(student[task]["allowed_impostors"][str(far)] for task in ("identity", "head")):
        print("notice: too few impostor pairs for this FAR: no impostor is allowed at all")
    write_json(os.path.join(settings.out, "table.json"), {"seeds": settings.seeds, "options": options, "table": table})


if __name__ == "__main__":
    command_line(main)

"""`make bench`: the engine beside a plain dense search, in one run, on this machine.

Every case runs in a process of its own, so that its peak memory is its own. Writes book/benchmarks.md; a name on the
command line runs that case alone and prints it.
"""

import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import dense
import torch
from torch.utils.flop_counter import FlopCounterMode

import wslib
from wslib.edits import edit

PAGE = Path(__file__).parents[1] / "book" / "benchmarks.md"


def gaussian(n, d, seed=0):
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (X * math.sqrt(d) / X.norm(dim=1, keepdim=True)).float()


def clock(function, runs):
    """Return the median seconds of ``runs`` calls and the last result."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def peak_speed():
    """Return the measured speed of a float32 matrix product, in operations a second."""
    A = torch.randn(2000, 2000, generator=torch.Generator().manual_seed(0))
    A @ A
    seconds, _ = clock(lambda: A @ A, 7)
    return 2 * 2000**3 / seconds


def attention(n, d, score="softmax", words=0, runs=3, plain=True, plain_steps=None):
    """The engine on one word or all, and the dense search for word 0, scaled up if cut short."""
    X, phi = gaussian(n, d), wslib.RandomAttention(d, score)
    if words == 0 and n <= 250:  # arrays so small that two threads wait for each other, in both searches
        torch.set_num_threads(1)

    def engine():
        starts = 64 if words == 0 else None
        return wslib.word_sensitivity(phi, X, words, starts=starts, bound=False, progress=False)

    with FlopCounterMode(display=False) as counter:
        engine()
    seconds, found = clock(engine, runs)
    row = {"seconds": seconds, "value": found.value, "share": counter.get_total_flops() / seconds / peak_speed()}
    row["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if plain:
        steps = 50 * n if plain_steps is None else plain_steps
        plain_seconds, value = clock(lambda: dense.search(X.double(), phi.W, score, steps=steps), 1)
        row |= {"plain": plain_seconds * 50 * n / steps, "plain value": value, "cut": plain_steps is not None}
    return row


def random_features(n, d):
    phi = wslib.RandomFeatures(n, d)
    seconds, found = clock(lambda: wslib.word_sensitivity(phi, gaussian(n, d), 0, bound=False, progress=False), 1)
    limit = (1 + math.sqrt(2 / n)) / math.sqrt(n)
    return {"seconds": seconds, "value": found.value, "to limit": found.value / limit}


def deep_random_features(n, d, depth):
    phi = wslib.DeepRandomFeatures(n, d, depth)
    seconds, found = clock(lambda: wslib.word_sensitivity(phi, gaussian(n, d), 0, bound=False, progress=False), 1)
    return {"seconds": seconds, "value": found.value}


def samples(count, n, d):
    """Gaussian texts and labels in turn, one text at a time so that no second copy is held."""
    X, y = torch.empty(count, n, d), torch.ones(count)
    for i in range(count):
        X[i] = gaussian(n, d, i)
    y[::2] = -1
    return X, y


def learning(phi, N, n, d):
    """Features, fit, fine-tuning, re-training, and one edit under a bound on gamma."""
    X, y = samples(N + 1, n, d)

    def whole():
        f = wslib.interpolate(phi, X[:N], y[:N], progress=False)
        f.fine_tune(X[N], float(y[N]))
        return wslib.find_edit(f.retrain(X[N], float(y[N])), X[N], float(y[N]), max_gamma=0.3)

    return {"seconds": clock(whole, 1)[0]}


def learning_beside_plain(N, n, d):
    """The re-trained model by the engine, and by pseudo-inverse and explicit projector (tests/dense.py)."""
    phi, (X, y) = wslib.RandomAttention(d), samples(N + 1, n, d)
    seconds, g = clock(lambda: wslib.interpolate(phi, X[:N], y[:N], progress=False).retrain(X[N], float(y[N])), 3)
    plain, theta = clock(lambda: dense.retrain(phi, X.double(), y.double()), 1)
    return {"seconds": seconds, "plain": plain, "apart": float((g.theta - theta).norm() / theta.norm())}


def cost(n, d):
    """One trial of one word in a batch of 64, forward only: its seconds, and its matrix products over 4nd + d² + n²."""
    X, phi = gaussian(n, d), wslib.RandomAttention(d)
    e, delta = edit(phi, X, 0), gaussian(64, d, 1)[None]
    e.squared(delta)
    with FlopCounterMode(display=False) as counter:
        e.squared(delta)
    seconds, _ = clock(lambda: e.squared(delta), 15)
    products = counter.get_total_flops() / 2 / 64
    formula = 4 * n * d + d * d + (n * n if n <= d else 0)
    return {"seconds": seconds / 64, "products": products, "to formula": products / formula}


CASES = {
    "softmax, n = 100, d = 384, word 0": lambda: attention(100, 384),
    "softmax, n = 200, d = 384, word 0": lambda: attention(200, 384, plain_steps=2000),
    "ReLU, n = 100, d = 384, word 0": lambda: attention(100, 384, "relu"),
    "ReLU, n = 200, d = 384, word 0": lambda: attention(200, 384, "relu", plain_steps=2000),
    "softmax, n = 250, d = 768, word 0": lambda: attention(250, 768, plain_steps=600),
    "softmax, n = 200, d = 384, all words": lambda: attention(200, 384, words="all", runs=1, plain_steps=600),
    "softmax, n = 4000, d = 768, word 0": lambda: attention(4000, 768, runs=1, plain=False),
    "RF, n = 150, d = 768, k = D": lambda: random_features(150, 768),
    "RF, n = 1000, d = 768, k = D": lambda: random_features(1000, 768),
    "DRF, n = 80, d = 768, L = 8, k = D": lambda: deep_random_features(80, 768, 8),
}
LEARNING = {
    "RAF, N = 1300, n = 120, d = 768": lambda: learning(wslib.RandomAttention(768), 1300, 120, 768),
    "RF, N = 1300, n = 40, d = 768, k = D": lambda: learning(wslib.RandomFeatures(40, 768), 1300, 40, 768),
    "RAF, N = 400, n = 20, d = 384, re-training alone": lambda: learning_beside_plain(400, 20, 384),
}
SIZES = [(100, 384), (200, 384), (400, 384), (100, 768), (200, 768), (400, 768), (1600, 768)]


def run(name):
    size = json.loads(name) if name.startswith("[") else None
    row = cost(*size) if size else {**CASES, **LEARNING}[name]()
    row.setdefault("memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if platform.system() == "Linux":
        row["memory"] *= 1024  # kilobytes there, bytes on macOS
    return row


def apart(name):
    done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def page(rows, learned, costs):
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
    yield "# Benchmarks\n"
    yield (
        f"Measured on {date.today():%d %B %Y} on {os.cpu_count()} cores ({processor}), Python "
        f"{platform.python_version()}, torch {torch.__version__}, by `make bench`. This page is the one place of the "
        "book whose numbers the build does not compute: it would have to time itself. Every row comes from a process "
        "of its own, and the times are medians of three where a run is short.\n"
    )
    yield "## The search beside a plain one\n"
    yield (
        "*Plain* is gradient ascent through the whole map for word 0, with the step and the number of steps of the "
        "paper's experiments (`tests/dense.py`). *Share* is the engine's matrix products over the speed of a large "
        "float32 matrix product on this machine. One word is searched from 64 starts, all words from the default of 32 "
        "each. One word of a text of up to 250 is searched by one thread, in both columns. Starred: a fifth of the "
        "plain steps, or 600, were run; their time is scaled up.\n"
    )
    yield "| case | engine | sup found | plain | sup found | faster | share | peak memory |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, r in rows.items():
        beside = "– | – | –"
        if "plain" in r:
            star = "*" if r["cut"] else ""
            beside = f"{r['plain']:.1f} s{star} | {r['plain value']:.4f}{star} | {r['plain'] / r['seconds']:.0f}×"
        share = f"{r['share']:.0%}" if "share" in r else "–"
        memory = f"{r['memory'] / 1e9:.2f} GB"
        yield f"| {name} | {r['seconds']:.2f} s | {r['value']:.4f} | {beside} | {share} | {memory} |"
    yield "\nFor random features, the value found over the limit $(1+\\sqrt{2/n})/\\sqrt n$ of long texts:"
    yield ", ".join(f"{r['to limit']:.3f} ({name})" for name, r in rows.items() if "to limit" in r) + ".\n"
    yield "## Learning beside a pseudo-inverse\n"
    yield (
        "The whole way from texts to the edit that a model learns: features, fit, fine-tuning, re-training and one "
        "edit. *Plain* is a pseudo-inverse of the feature matrix and an explicit D × D projector, in float64, where "
        "that fits; the difference is that of the re-trained parameters, relative to their norm.\n"
    )
    yield "| case | engine | plain | faster | difference | peak memory |"
    yield "|---|---|---|---|---|---|"
    for name, r in learned.items():
        beside = (
            f"{r['plain']:.0f} s | {r['plain'] / r['seconds']:.0f}× | {r['apart']:.0e}" if "plain" in r else "– | – | –"
        )
        yield f"| {name} | {r['seconds']:.1f} s | {beside} | {r['memory'] / 1e9:.2f} GB |"
    yield "\n## What a trial costs\n"
    yield (
        "One perturbation of one word, in a batch of 64: multiplications counted by torch, over the formula "
        "$4nd+d^2$ (plus $n^2$ while $n\\le d$, where that is the cheaper way), and microseconds.\n"
    )
    yield "| n | d | multiplications | over the formula | microseconds |"
    yield "|---|---|---|---|---|"
    for (n, d), r in costs.items():
        yield f"| {n} | {d} | {r['products']:.3g} | {r['to formula']:.3f} | {r['seconds'] * 1e6:.0f} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1])))
    else:
        rows, learned = {}, {}
        for cases, results in ((CASES, rows), (LEARNING, learned)):
            for name in cases:
                results[name] = apart(name)
                print(name, results[name], flush=True)
        costs = {size: apart(json.dumps(size)) for size in SIZES}
        PAGE.write_text("\n".join(page(rows, learned, costs)) + "\n")
        print(f"written to {PAGE.relative_to(Path.cwd())}")

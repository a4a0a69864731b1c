"""Measures the forms of MLA attention over (Sq, Sk, H) on a GPU and fits the cost model to them.

usage: calibrate_forms.py [--heads 16 128] [--backend auto] [--out FILE.jsonl]
       calibrate_forms.py --fit FILE.jsonl
One JSON line a case (ms by form, and what the shipped rates would choose), then a summary: the
fitted `Rates`, to be pasted into radix_mla/attention/forms.py, and the regret of choosing by them
(chosen over best, measured). Times are of graph replays with a cold L2: what the device takes.
What a captured step saves on the host (`capture_gain_s`) is not fitted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from radix_mla.attention.forms import H200_RATES, Form, FormChooser, Rates
from radix_mla.attention.workspace import MLADims

NEW = (16, 48, 96, 128, 192, 256, 512, 2_048)
CONTEXT = (0, 512, 2_048, 8_192, 32_768)
FORMS: tuple[Form, ...] = get_args(Form)
FITTED = ("absorbed", "attention", "one_shot", "gemm", "call_s")
ROWS = 32_768


def dims_of(heads: int) -> MLADims:
    return MLADims(num_heads=heads, latent=512, nope=128, rope=64, value=128)


def measure(heads: int, backend: str) -> list[dict[str, Any]]:
    from attention_case import Bench, timed_graph_ms

    bench = Bench(heads, backend=backend, workspace_rows=ROWS)
    cases = []
    for num_context in CONTEXT:
        for num_new in NEW:
            batch = bench.batch([(num_new, num_context)])
            times = {}
            for form in FORMS:
                fits = num_new + num_context <= ROWS and num_context > 0
                if form == "one_shot" and not fits:
                    continue
                call = bench.attend(bench.context(batch, form))
                times[form] = round(timed_graph_ms(call, runs=7), 4)
            case = {"heads": heads, "new": num_new, "context": num_context, "ms": times}
            case["chosen"] = FormChooser(dims_of(heads), ROWS, H200_RATES).choose(
                num_new, num_context
            )
            print(json.dumps(case), flush=True)
            cases.append(case)
    return cases


def predicted_ms(rates: Rates, case: dict[str, Any], form: str) -> float:
    chooser = FormChooser(dims_of(case["heads"]), ROWS, rates)
    cost = {
        "absorbed": chooser.absorbed_s,
        "non_absorbed": chooser.chunked_s,
        "one_shot": chooser.one_shot_s,
    }[form]
    return cost(case["new"], case["context"]) * 1e3


def misfit(rates: Rates, cases: list[dict[str, Any]]) -> float:
    """Mean squared log of predicted over measured."""
    logs = [
        math.log(predicted_ms(rates, case, form) / ms) ** 2
        for case in cases
        for form, ms in case["ms"].items()
    ]
    return sum(logs) / len(logs)


def fit(cases: list[dict[str, Any]], start: Rates) -> Rates:
    """Coordinate descent in factors that shrink to 1%."""
    best, least = start, misfit(start, cases)
    for factor in (2.0, 1.4, 1.15, 1.05, 1.01):
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for change in (factor, 1 / factor):
                    trial = replace(best, **{name: getattr(best, name) * change})
                    error = misfit(trial, cases)
                    if error < least * 0.9999:
                        best, least, improved = trial, error, True
    return best


def regret(rates: Rates, cases: list[dict[str, Any]]) -> dict[str, object]:
    """Measured time of the chosen form over that of the best one."""
    ratios = []
    for case in cases:
        chosen = FormChooser(dims_of(case["heads"]), ROWS, rates).choose(
            case["new"], case["context"]
        )
        ratios.append((case["ms"][chosen] / min(case["ms"].values()), case, chosen))
    worst, case, chosen = max(ratios, key=lambda entry: entry[0])
    return {
        "mean": round(sum(r for r, *_ in ratios) / len(ratios), 3),
        "worst": round(worst, 3),
        "worst_case": {**case, "chosen": chosen},
    }


def summarise(cases: list[dict[str, Any]]) -> None:
    shipped = replace(H200_RATES, captured_tokens=0)
    fitted = fit(cases, shipped)
    print(json.dumps({"shipped": regret(shipped, cases), "fitted": regret(fitted, cases)}))
    digits = {name: float(f"{value:.3g}") for name, value in asdict(fitted).items()}
    print(f"misfit {misfit(shipped, cases):.3f} -> {misfit(fitted, cases):.3f}")
    print("Rates(" + ", ".join(f"{name}={value:g}" for name, value in digits.items()) + ")")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fit", type=Path)
    options = parser.parse_args()
    if options.fit is not None:
        summarise([json.loads(line) for line in options.fit.read_text().splitlines()])
        return
    import torch

    with torch.inference_mode():
        cases = [case for heads in options.heads for case in measure(heads, options.backend)]
    if options.out is not None:
        options.out.write_text("".join(json.dumps(case) + "\n" for case in cases))
    summarise(cases)


if __name__ == "__main__":
    main()

"""Goals and sentences that the summary says of chapter 1."""

import pandas as pd

from helpers.lab.tables import reached

RUNS = {
    "fp32": "fp32",
    "fp16": "pure fp16",
    "amp": "AMP fp16, no scaler",
    "static": "AMP fp16, static scale",
    "dynamic": "AMP fp16, dynamic scale",
    "torch-scaler": "AMP fp16, torch's scaler",
    "bf16": "AMP bf16",
}
GOAL_ACCURACY = 0.985
GOAL_SPEEDUP, GOAL_OVERHEAD, GOAL_AUTOCAST = 1.3, 1.02, 1.02


def step_verdicts(steps: pd.DataFrame, autocast: pd.DataFrame) -> list[str]:
    """What the chapter aims at in speed, held against the records."""
    if not len(steps) and not len(autocast):
        return ["What scaling and autocast cost has not been measured on a GPU yet."]
    said = []
    for row in steps[steps["variant"] == "ours"].to_dict("records") if len(steps) else []:
        faster = 1 / row["ratio_to_torch"]
        said.append(
            f"{row['gpu']}, {row['million_parameters']} M parameters: unscale, clip and step {faster:.2f}× as fast as "
            f"torch's ({reached(faster >= GOAL_SPEEDUP)}: at least {GOAL_SPEEDUP}), "
            f"{row['ratio_to_no_scaler']:.3f} of the step without a scaler "
            f"({reached(row['ratio_to_no_scaler'] <= GOAL_OVERHEAD)}: at most {GOAL_OVERHEAD}), "
            f"{int(row['host_reads'])} waits for the GPU"
        )
    for row in autocast[autocast["variant"] == "ours"].to_dict("records") if len(autocast) else []:
        said.append(
            f"{row['gpu']}, width {row['hidden']}: a step under our Autocast takes {row['ratio_to_torch']:.3f} of one "
            f"under torch's ({reached(row['ratio_to_torch'] <= GOAL_AUTOCAST)}: at most {GOAL_AUTOCAST})"
        )
    return said

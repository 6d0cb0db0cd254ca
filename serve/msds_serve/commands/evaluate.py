"""`msds evaluate`: accuracy on tasks whose answers can be checked, by kind, and against another model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from msds.pretrained import model_folder
from msds_serve.commands import add_command, add_model


def add(commands: Any) -> None:
    """Define the command."""
    command = add_command(commands, "evaluate", run, "Measure accuracy on tasks with checkable answers, greedily.")
    add_model(command, "Hugging Face folder")
    command.add_argument(
        "tasks", metavar="TASKS", help='JSON lines: {"messages": [...], "answer": "...", "kind": "..."}'
    )
    command.add_argument("--baseline", metavar="MODEL", type=model_folder, help="compare with this model, task by task")
    command.add_argument("--max-tokens", metavar="N", type=int, default=128, help="of an answer; default 128")
    command.add_argument(
        "--no-reasoning", action="store_true", help="close the thinking at once: what the model knows without it"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Print the table, or its numbers."""
    from msds.train.evaluate import mcnemar, measure, render_scores
    from msds.train.verifiable import read_tasks

    tasks = read_tasks(Path(options.tasks))
    settings = {"max_tokens": options.max_tokens, "reasoning": not options.no_reasoning}
    right, rows = measure(options.model, tasks, **settings)
    report: dict[str, Any] = {"model": options.model, "scores": [row.to_json() for row in rows]}
    text = render_scores(rows)
    if options.baseline is not None:
        before, baseline = measure(options.baseline, tasks, **settings)
        won, lost, p = mcnemar(before, right)
        report["baseline"] = {
            "model": options.baseline,
            "scores": [row.to_json() for row in baseline],
            "won": won,
            "lost": lost,
            "p_value": p,
        }
        text = (
            f"{options.model}\n{text}\n\n{options.baseline}\n{render_scores(baseline)}\n\n"
            f"against the baseline: {won} tasks won, {lost} lost, p = {p:.2g} (McNemar, exact)"
        )
    print(json.dumps(report, ensure_ascii=False) if options.json else text)
    return 0

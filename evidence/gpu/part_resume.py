"""Saves after two steps, resumes for the third, and checks that the resume is exact."""

from __future__ import annotations

from gpu import runs
from gpu.record import same
from gpu.world import model_folder, world

SOURCE = "tests/e2e/test_e2e_lab.py"
RECIPE = "math_sepa"  # one GPU is enough


def run(setting, record) -> None:
    with world(setting) as here:
        model = model_folder(setting, runs.named_model(RECIPE))
        hardware = "spark" if setting.hardware == "spark" else "h100x1"
        given = [f"hardware={hardware}", *here.overrides(RECIPE, model), *runs.SMALL, "trainer.save_freq=2"]
        run_dir, _ = runs.train(setting, "resume", RECIPE, [*given, "trainer.total_training_steps=2"])
        _, output = runs.train(
            setting, "resume", RECIPE, [*given, "trainer.total_training_steps=3"], keep=True
        )
    line = next((line for line in output.splitlines() if "resume:" in line), "nothing about a resume")
    found = {"resume": line[line.find("resume:") :], "steps": [row["step"] for row in runs.metrics(run_dir)]}
    found["steps"] = ", ".join(map(str, found["steps"]))
    record.add(
        "resume", found, {"resume": same("resume: exact, from step 2"), "steps": same("1, 2, 3")}, SOURCE
    )

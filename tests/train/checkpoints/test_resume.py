"""A run that was stopped, killed or moved to other ranks is the run that never was."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from dataset.errors import BAD_DATA, CHECKPOINTED, DONE, USER_MISTAKE
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import EVERY_STEP, final_state, find_differences, read_trace, strip_times
from train.checkpoints.checkpoint import list_checkpoints
from train.data.sampler import epoch_order
from train.records.record import EPOCHS_FILE, read_epochs, read_lines, read_run

pytestmark = pytest.mark.training

NUM_TRAIN, BATCH, STEPS = 42, 8, 5  # images, batch, steps an epoch


# --- kill and resume --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "arch"),
    [(1, ranks.ARCH), (2, ranks.ARCH), pytest.param(2, ranks.REAL_ARCH, marks=pytest.mark.soak)],
)
def test_a_killed_and_resumed_run_is_bit_for_bit_the_undisturbed_one(
    images: Path, tmp_path: Path, world: int, arch: str
) -> None:
    """Killed -9 in the second epoch: model, buffers, optimiser, EMA, sums and results agree."""
    argv = [str(images), "--epochs", "2", "--ema", "0.99", "--microbatch", "2", "--momentum", "0.9"]
    argv += ["-a", arch]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run([*argv, "--output", str(whole)], tmp_path / "log0", world).expect(DONE)
    argv += ["--output", str(parts)]
    kill = partial(hooks.at_step, 0, 7, partial(hooks.wait_and_kill, parts, 6))
    killed = ranks.run([*argv, *EVERY_STEP], tmp_path / "log1", world, hook=kill)
    assert killed.codes[0] == -signal.SIGKILL
    assert [int(path.stem[5:]) for path in list_checkpoints(parts / "ckpt")][-1] in (6, 7)
    resumed = ranks.run(argv, tmp_path / "log2", world).expect(DONE)
    assert "continuing from step" in resumed.log
    assert find_differences(final_state(parts), final_state(whole)) == []
    assert strip_times(read_epochs(parts)) == strip_times(read_epochs(whole))
    assert final_state(whole)["ema"] and final_state(whole)["step"] == 10


def test_ranks_hold_the_same_state_and_another_seed_another(images: Path, tmp_path: Path) -> None:
    """The comparison above can fail: a single other bit of randomness is seen."""
    argv = [str(images), "--max-steps", "3"]
    for seed in ("0", "1"):
        out = tmp_path / seed
        ranks.run([*argv, "--seed", seed, "--output", str(out)], tmp_path / f"log{seed}")
    differences = find_differences(final_state(tmp_path / "0"), final_state(tmp_path / "1"))
    assert any("running_var" in place for place in differences)
    assert any("momentum_buffer" in place for place in differences)


def test_another_number_of_ranks_goes_on_with_the_same_samples_and_values(
    images: Path, tmp_path: Path
) -> None:
    """2 -> 1 -> 4 ranks against 1 rank, in float64: 4 steps, every parameter and every buffer."""
    # Batch norm over few values is ill-conditioned, and would show rounding and not mistakes.
    argv = [str(images), "--precision", "fp64", "--ema", "0.9", "-b", "16", "--microbatch", "4"]
    argv += ["--image-size", "64", "--lr", "0.02", "--warmup-epochs", "1"]
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    trace = partial(hooks.trace_samples, tmp_path / "whole.jsonl")
    alone = [*argv, "--max-steps", "4", "--output", str(whole)]
    ranks.run(alone, tmp_path / "log", 1, hook=trace).expect(DONE)
    for number, (world, steps) in enumerate([(2, 1), (1, 2), (4, 4)]):
        trace = partial(hooks.trace_samples, tmp_path / "moved.jsonl")
        part = [*argv, "--max-steps", str(steps), "--output", str(moved)]
        ranks.run(part, tmp_path / f"log{number}", world, hook=trace).expect(DONE)
    assert read_trace(tmp_path / "moved.jsonl") == read_trace(tmp_path / "whole.jsonl")
    a, b = final_state(moved), final_state(whole)
    assert a["step"] == b["step"] == 4
    compare(a["model"], b["model"])
    compare(a["ema"], b["ema"])
    for key, slot in b["optimizer"]["state"].items():
        compare(a["optimizer"]["state"][key], slot)
    assert [attempt["ranks"] for attempt in read_run(moved)["attempts"]] == [2, 1, 4]


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # A value near 0 is compared on the scale of its tensor; a bias before batch norm has no
        # gradient but rounding, 1e-17 here.
        scale = float(tensor.abs().max()) if tensor.is_floating_point() else 1.0
        atol = max(1e-8 * scale, 1e-14)
        assert torch.allclose(found[name], tensor, rtol=1e-8, atol=atol), name


def test_the_samples_of_each_step_are_those_of_the_promised_order(
    images: Path, tmp_path: Path
) -> None:
    argv = [str(images), "--epochs", "2", "--seed", "4", "--microbatch", "2"]
    hook = partial(hooks.trace_samples, tmp_path / "trace")
    ranks.run([*argv, "--output", str(tmp_path / "o")], tmp_path / "log", 2, hook=hook).expect(DONE)
    trained = read_trace(tmp_path / "trace")
    assert sorted(trained) == list(range(2 * STEPS))
    for step, parts in trained.items():
        order = epoch_order(4, step // STEPS, NUM_TRAIN)
        first = step % STEPS * BATCH
        assert [i for p in sorted(parts) for i in parts[p]] == order[first : first + BATCH].tolist()


@pytest.mark.parametrize("decoder", ["pil", "auto"])
def test_workers_do_not_change_the_result(images: Path, tmp_path: Path, decoder: str) -> None:
    """Worker processes for Pillow, threads for the kernel, or none."""
    argv = [str(images), "--epochs", "1", "--decoder", decoder]
    for workers in ("0", "2"):
        out = str(tmp_path / workers)
        job = ranks.run([*argv, "-j", workers, "--output", out], tmp_path / f"log{workers}")
        job.expect(DONE)
    assert find_differences(final_state(tmp_path / "2"), final_state(tmp_path / "0")) == []


def test_dropout_does_not_depend_on_the_ranks(images: Path, tmp_path: Path) -> None:
    """Its randomness comes from the step and the microbatch: SqueezeNet drops half of a layer."""
    argv = [str(images), "-a", "squeezenet1_1", "--precision", "fp64", "--microbatch", "2"]
    argv += ["--max-steps", "2", "--lr", "0.01"]
    for world in (1, 4):
        out = str(tmp_path / str(world))
        ranks.run([*argv, "--output", out], tmp_path / f"log{world}", world).expect(DONE)
    compare(final_state(tmp_path / "4")["model"], final_state(tmp_path / "1")["model"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--precision", "bf16", "--label-smoothing", "0.1"],
        ["--recipe", "lars", "--ema", "0.99"],
        ["--recipe", "reference", "-a", "squeezenet1_1"],
    ],
)
def test_other_precisions_recipes_and_models_resume_bit_for_bit(
    images: Path, tmp_path: Path, flags: list[str]
) -> None:
    argv = [str(images), "--epochs", "1", "--microbatch", "4", *flags]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run([*argv, "--output", str(whole)], tmp_path / "log0").expect(DONE)
    argv += ["--output", str(parts)]
    ranks.run([*argv, "--max-steps", "2"], tmp_path / "log1").expect(DONE)
    ranks.run(argv, tmp_path / "log2").expect(DONE)
    differences = find_differences(final_state(parts), final_state(whole))
    assert [d for d in differences if "best" not in d] == []  # it was validated once more


# --- validation that is still due -------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("step", [STEPS - 1, 2 * STEPS - 1])
def test_a_stop_at_the_last_step_of_an_epoch_does_not_lose_its_validation(
    images: Path, tmp_path: Path, world: int, step: int
) -> None:
    """The signal comes while the last step is prepared, also that of the whole run."""
    argv = [str(images), "--epochs", "2", "--microbatch", "4"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run([*argv, "--output", str(whole)], tmp_path / "log0", world).expect(DONE)
    argv += ["--output", str(parts)]
    # On two ranks the vote is heard one microbatch later: the signal must come a step earlier.
    signalled = step if world == 1 else step - 1
    hook = partial(hooks.at_step, 0, signalled, hooks.terminate_myself)
    ranks.run(argv, tmp_path / "log1", world, hook=hook).expect(CHECKPOINTED)
    stopped = final_state(parts)
    assert (stopped["step"], stopped["is_evaluated"]) == (step + 1, False)
    assert len(read_epochs(parts)) == step // STEPS
    ranks.run(argv, tmp_path / "log2", world).expect(DONE)
    assert find_differences(final_state(parts), final_state(whole)) == []
    assert strip_times(read_epochs(parts)) == strip_times(read_epochs(whole))
    assert read_run(parts)["result"] == read_run(whole)["result"]


def test_a_stop_during_a_validation_leaves_it_for_the_next_start(
    images: Path, tmp_path: Path
) -> None:
    argv = [str(images), "--epochs", "2", "--microbatch", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run([*argv, "--output", str(whole)], tmp_path / "log0", 2).expect(DONE)
    argv += ["--output", str(parts)]
    hook = partial(hooks.at_validation, 1, 1, hooks.terminate_myself)
    ranks.run(argv, tmp_path / "log1", 2, hook=hook).expect(CHECKPOINTED)
    stopped = final_state(parts)
    assert (stopped["step"], stopped["is_evaluated"]) == (STEPS, False)
    ranks.run(argv, tmp_path / "log2", 2).expect(DONE)
    # The seconds of an epoch are those of its training, of which the second start did nothing.
    assert read_epochs(parts)[0]["seconds"] == stopped["epoch_sums"]["seconds"]
    assert find_differences(final_state(parts), final_state(whole)) == []
    assert strip_times(read_epochs(parts)) == strip_times(read_epochs(whole))


# --- done, extended, named --------------------------------------------------------------------


def test_a_finished_run_says_so_and_changes_nothing(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--epochs", "1", "--output", str(out)]
    ranks.run(argv, tmp_path / "log0", 2).expect(DONE)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    job = ranks.run(argv, tmp_path / "log1", 2).expect(DONE)
    assert "this run is done already, nothing to do" in job.log
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_a_kill_between_the_last_checkpoint_and_the_record_is_made_good(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--epochs", "1", "--output", str(out), "--save-model"]
    hook = partial(hooks.before, "train.saving", "save_state_dict", hooks.kill_myself)
    job = ranks.run(argv, tmp_path / "log0", hook=hook)
    assert job.codes == [-signal.SIGKILL]
    assert read_run(out)["status"] == "running"
    ranks.run(argv, tmp_path / "log1").expect(DONE)
    run = read_run(out)
    assert (run["status"], run["exit_code"]) == ("done", DONE)
    assert [attempt["reason"] for attempt in run["attempts"]] == ["killed", "done"]
    assert run["result"]["final_acc1"] == read_epochs(out)[-1]["val_acc1"]
    model = torch.load(out / f"{ranks.ARCH}_7_classes.pt", weights_only=True)
    assert find_differences(model, final_state(out)["model"]) == []


def test_a_longer_run_goes_on_from_a_finished_shorter_one(images: Path, tmp_path: Path) -> None:
    """--max-steps in the middle of an epoch, then to its end: its record is of all of it."""
    argv = [str(images), "--epochs", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run([*argv, "--output", str(whole)], tmp_path / "log0").expect(DONE)
    argv += ["--output", str(parts)]
    for number, steps in enumerate(("3", "7", "10")):
        job = ranks.run([*argv, "--max-steps", steps], tmp_path / f"log1{number}").expect(DONE)
        assert "done:" in job.log
        assert read_epochs(parts)[-1]["step"] == int(steps)
    epochs = read_epochs(parts)
    assert [epoch["images"] for epoch in epochs] == [STEPS * BATCH] * 2
    assert strip_times(epochs) == strip_times(read_epochs(whole))
    differences = find_differences(final_state(parts), final_state(whole))
    assert [d for d in differences if "best" not in d] == []  # it was validated more often
    assert read_run(parts)["images_trained"] == 10 * BATCH


def test_a_restart_of_a_command_with_a_named_checkpoint_goes_on(
    images: Path, tmp_path: Path
) -> None:
    """SLURM requeues the same command: --resume must not throw away what was trained since."""
    first, out = tmp_path / "first", tmp_path / "out"
    argv = [str(images), "--epochs", "2"]
    ranks.run([*argv, "--output", str(first), "--max-steps", "2"], tmp_path / "log0").expect(DONE)
    named = first / "ckpt" / "step-000000002.pt"
    argv += ["--resume", str(named), "--output", str(out)]
    hook = partial(hooks.at_step, 0, 5, hooks.terminate_myself)  # heard before the next step
    job = ranks.run(argv, tmp_path / "log1", hook=hook).expect(CHECKPOINTED)
    assert "continuing from step 2 " in job.log
    job = ranks.run(argv, tmp_path / "log2").expect(DONE)
    assert "continuing from step 7 " in job.log


def test_a_named_older_checkpoint_rewinds_its_own_run(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--epochs", "2", "--output", str(out)]
    hook = partial(hooks.at_step, 0, 7, hooks.terminate_myself)
    ranks.run(argv, tmp_path / "log0", hook=hook).expect(CHECKPOINTED)
    older = out / "ckpt" / f"step-{STEPS:09d}.pt"
    assert older.exists()
    job = ranks.run([*argv, "--resume", str(older)], tmp_path / "log1").expect(DONE)
    assert f"continuing from step {STEPS} " in job.log
    assert [e["epoch"] for e in read_epochs(out)] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "code"), [("missing", USER_MISTAKE), ("foreign", USER_MISTAKE), ("torn", BAD_DATA)]
)
def test_a_named_checkpoint_that_is_none_is_an_error_and_no_fresh_start(
    images: Path, tmp_path: Path, kind: str, code: int
) -> None:
    path = tmp_path / "named.pt"
    if kind == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    elif kind == "torn":
        torch.save({"weights": torch.zeros(3)}, path)
        path.write_bytes(path.read_bytes()[:100])
    argv = [str(images), "--resume", str(path), "--output", str(tmp_path / "out")]
    job = ranks.run(argv, tmp_path / "log", 2).expect(code)
    assert str(path) in job.log
    assert job.log.count("error: ") == 1  # said once, not by every rank
    assert "Traceback" not in job.log
    assert not (tmp_path / "out").exists()


# --- another run in the folder ----------------------------------------------------------------


def test_a_changed_recipe_or_data_set_is_refused_with_what_changed(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--max-steps", "1", "--output", str(out)]
    ranks.run(argv, tmp_path / "log0").expect(DONE)
    changes = {
        "lr: 0.05 -> 0.06": ["--lr", "0.06"],
        "wd: 6.103515625e-05 -> 0.5": ["--wd", "0.5"],
        "batch_size: 8 -> 4": ["-b", "4"],
        "seed: 0 -> 1": ["--seed", "1"],
        "image_size: 32 -> 40": ["--image-size", "40"],
        "ema: 0.0 -> 0.5": ["--ema", "0.5"],
        f"arch: {ranks.ARCH} -> squeezenet1_1": ["-a", "squeezenet1_1"],
        "precision: fp32 -> fp64": ["--precision", "fp64"],
        "epochs: 90 -> 30": ["--epochs", "30"],
    }
    for number, (diff, flags) in enumerate(changes.items()):
        job = ranks.run([*argv, *flags], tmp_path / f"log1{number}").expect(USER_MISTAKE)
        assert diff in job.log
        assert "--force" in job.log
    other = tmp_path / "other"
    (other / "train").mkdir(parents=True)
    for wnid in (images / "train").iterdir():
        (other / "train" / wnid.name).mkdir()
        for file in sorted(wnid.iterdir())[1:]:
            (other / "train" / wnid.name / file.name).symlink_to(file)
    job = ranks.run([str(other), *argv[1:]], tmp_path / "log2").expect(USER_MISTAKE)
    assert "num_train: 42 -> 35" in job.log and "data: " in job.log


def test_force_goes_on_with_the_new_recipe(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--max-steps", "1", "--output", str(out)]
    ranks.run(argv, tmp_path / "log0").expect(DONE)
    weights = final_state(out)["model"]
    new = ["--wd", "0.5", "--momentum", "0.3", "--ema", "0.9", "--max-steps", "2", "--force"]
    ranks.run([*argv, *new], tmp_path / "log1").expect(DONE)
    state = final_state(out)
    assert state["step"] == 2
    (group, *_) = state["optimizer"]["param_groups"]
    assert (group["weight_decay"], group["momentum"]) == (0.5, 0.3)
    name = "conv1.0.weight"
    # The average starts from the weights of the checkpoint, and not from the first random ones.
    moved = (state["ema"][name] - weights[name]).abs().max()
    assert 0 < moved <= (state["model"][name] - weights[name]).abs().max()


def test_force_cannot_make_weights_fit_another_arch(images: Path, tmp_path: Path) -> None:
    argv = [str(images), "--max-steps", "1", "--output", str(tmp_path / "out")]
    ranks.run(argv, tmp_path / "log0").expect(DONE)
    job = ranks.run([*argv, "--force", "-a", "squeezenet1_1"], tmp_path / "log1")
    assert "another arch" in job.expect(USER_MISTAKE).log
    assert "Traceback" not in job.log


def test_a_run_from_the_folder_goes_on_from_the_tars(
    images: Path, tars: Path, tmp_path: Path
) -> None:
    argv = ["--epochs", "1", "--output", str(tmp_path / "out")]
    ranks.run([str(images), *argv, "--max-steps", "2"], tmp_path / "log0").expect(DONE)
    ranks.run([str(tars), *argv], tmp_path / "log1", 2).expect(DONE)
    assert len(read_lines(tmp_path / "out" / EPOCHS_FILE)) == 2

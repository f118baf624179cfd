"""Jobs of condor/train.sub in HTCondor's container universe, with a real apptainer.

The image is made from condor/trainyard.def, by apptainer itself, on Debian's root in place of the
image of a registry; what its %post would download, jobs see of the project's .venv.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.condor.grid_mode import (
    ROOT,
    SLOW,
    eager_python,
    read_errors,
    read_output,
    read_result,
    submit_training,
    wait_for_step,
)
from tests.cluster.condor.layout import IMAGE
from tests.cluster.condor.pool import enter

pytestmark = [pytest.mark.condor, pytest.mark.timeout(900)]
NUM_STEPS = 80  # so many that an eviction after the third comes before the last
# The slots see the folder of images, as on sites with a shared file system.
SHARED = "transfer_container = false"


@pytest.fixture(scope="module")
def image(condor: ModuleType) -> Path:
    """A folder image of the recipe, without its downloads."""
    assert condor.run("apptainer --version").startswith("apptainer version")
    recipe = (ROOT / "condor/trainyard.def").read_text()
    recipe = re.sub(r"^Bootstrap:.*\nFrom:.*", f"Bootstrap: localimage\nFrom: {IMAGE}", recipe)
    recipe = re.sub(r"(?s)\n%post\n.*?\n%", "\n%", recipe)
    folder: Path = condor.make_folder({"trainyard.def": recipe})
    command = f"cd {ROOT} && apptainer build --sandbox {folder}/image {folder}/trainyard.def"
    command += f" && chmod 755 {folder}/image/root"  # the project's Python may lie below it
    done = subprocess.run(enter(command, "root"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "image"


def test_a_job_in_a_container_trains_and_outlives_exit_85_and_an_eviction(
    condor: ModuleType, image: Path
) -> None:
    inside = 'echo "image=$TRAINYARD_IMAGE container=$APPTAINER_CONTAINER" >&2\n'
    python = eager_python(condor, 1).replace("exec ", f"{inside}exec ")
    python = re.sub(r"(>>|<)starts", r'\1"${0%/*}/starts"', python)  # one for all sandboxes
    job = submit_training(
        condor, SHARED, {"python": python}, IMAGE=str(image), PYTHON="FOLDER/python",
        TRAIN=f"{SLOW} --max-steps {NUM_STEPS}",
    )  # fmt: skip
    wait_for_step(condor, job, after="from step")
    job.act("vacate_job")
    assert job.wait() == 0
    run = read_result(job)
    reasons = [attempt["reason"] for attempt in run["attempts"]]
    assert reasons == ["checkpoint interval", "SIGTERM", "done"]
    assert run["images_trained"] == NUM_STEPS * 16
    assert f"image=/opt/trainyard container={image}" in read_errors(job)
    stopped = re.findall(rf"stopped at step (\d+) of {NUM_STEPS}", read_output(job))
    assert re.findall(rf"from step (\d+) of {NUM_STEPS}", read_output(job)) == stopped


def test_an_image_that_cannot_start_is_given_up_after_max_starts(condor: ModuleType) -> None:
    """HTCondor itself would start such a job again every few seconds for ever."""
    empty = condor.make_folder({"etc/hostname": "no image\n"})
    job = submit_training(condor, SHARED, IMAGE=str(empty), MAX_STARTS="1")
    removed = job.wait_for("JOB_ABORTED")
    assert "PeriodicRemove" in removed["Reason"]
    assert "Singularity test failed" in job.log.read_text()

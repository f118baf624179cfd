"""condor/train.sub as condor_submit reads it: macros, containers, limits; nothing is run."""

from __future__ import annotations

import shlex
from types import ModuleType

import pytest

from tests.cluster.condor.grid_mode import ROOT

pytestmark = pytest.mark.condor


def describe(condor: ModuleType, *macros: str) -> dict[str, str]:
    """The attributes of the first job that the macros would submit."""
    command = f"condor_submit {ROOT / 'condor/train.sub'} -dry-run - {shlex.join(macros)}"
    answer: str = condor.run(command)
    first = answer.partition("\n.\n")[0]
    pairs = [line.partition("=") for line in first.splitlines() if "=" in line]
    return {name: value.strip('"') for name, _, value in pairs}


def test_the_command_of_the_manual(condor: ModuleType) -> None:
    ad = describe(condor, "N=100", "EPOCHS=5", "DATA=osdf:///ns/train.tar", "DATA_GB=138")
    assert "DATA=osdf:///ns/train.tar" in ad["Environment"]
    assert "EPOCHS=5" in ad["Environment"]
    assert int(ad["RequestDisk"]) * 1024 == 148 << 30
    assert ad["RequestGPUs"] == "1"
    assert (ad["GPUsMinCapability"], ad["GPUsMinRuntime"]) == ("7.5", "13000")
    assert (ad["SuccessCheckpointExitCode"], ad["TransferCheckpoint"]) == ("85", "out")
    assert (ad["WhenToTransferOutput"], ad["TransferOutput"]) == ("ON_EXIT_OR_EVICT", "out")
    assert (ad["JobDurationCategory"], ad["AllowedExecuteDuration"]) == ("Medium", "72000")
    assert ad["UserLogExecuteEventAttrs"] == "GLIDEIN_ResourceName,GPUs_DeviceName"
    assert "WantContainer" not in ad
    assert "TransferPlugins" not in ad


def test_each_job_has_a_seed_and_a_place_of_its_own(condor: ModuleType) -> None:
    command = f"condor_submit {ROOT / 'condor/train.sub'} -dry-run - N=3 DATA=dummy"
    jobs = condor.run(command).split("\n.\n")
    for proc, text in enumerate(jobs[:3]):
        assert f"SEED={proc} " in text
        assert f'TransferOutputRemaps="out = results/1.{proc}"' in text


def test_an_image_makes_it_a_container_job(condor: ModuleType) -> None:
    image = "osdf:///ospool/uc-shared/public/OSG-Staff/pytorch-2.1.1.sif"
    ad = describe(condor, "DATA=dummy", f"IMAGE={image}")
    assert (ad["WantContainer"], ad["ContainerImage"]) == ("true", "pytorch-2.1.1.sif")
    assert image in ad["TransferInput"]
    assert ad.get("TransferExecutable", "true") == "true"  # else job.sh would have to be in it


def test_weights_travel_with_the_job(condor: ModuleType) -> None:
    ad = describe(condor, "DATA=dummy", "WEIGHTS=/home/me/resnet50-11ad3fa6.pth")
    assert ad["TransferInput"].endswith("/scripts,/home/me/resnet50-11ad3fa6.pth")
    assert "WEIGHTS=/home/me/resnet50-11ad3fa6.pth" in ad["Environment"]
    assert describe(condor, "DATA=dummy")["TransferInput"].endswith("/scripts")


def test_extracted_data_needs_twice_the_disk(condor: ModuleType) -> None:
    tar = describe(condor, "DATA=osdf:///x", "DATA_GB=100")
    both = describe(condor, "DATA=osdf:///x", "DATA_GB=100", "DATA_MODE=extract")
    assert int(tar["RequestDisk"]) * 1024 == 110 << 30
    assert int(both["RequestDisk"]) * 1024 == 220 << 30


def test_the_plugin_brings_the_data_where_it_is_asked_for(condor: ModuleType) -> None:
    ad = describe(condor, "DATA=osdf:///x/y.tar", "PLUGIN=true", "PLUGIN_MINUTES=40")
    assert ad["TransferPlugins"].startswith("osdf,pelican=")
    assert ad["TransferInput"].endswith("osdf:///x/y.tar")
    assert ad["PluginMinutes"] == "40"


def test_sites_can_be_avoided(condor: ModuleType) -> None:
    ad = describe(condor, "DATA=dummy", "AVOID_SITES=SITE-A,SITE-B")
    assert 'TARGET.GLIDEIN_ResourceName ?: "","SITE-A,SITE-B") =!= true' in ad["Requirements"]


def test_retries_releases_and_removals_are_bounded(condor: ModuleType) -> None:
    ad = describe(condor, "DATA=dummy")
    assert ad["OnExitRemove"].startswith("NumJobCompletions > JobMaxRetries || ExitCode =?= 0")
    assert "ExitCode == 2" in ad["OnExitRemove"]
    assert "<= 10" in ad["PeriodicRelease"]
    assert "> 300" in ad["PeriodicRelease"]
    assert "86400 * 3" in ad["PeriodicRemove"]


def test_words_with_spaces_reach_the_trainer_whole(condor: ModuleType) -> None:
    ad = describe(condor, "DATA=dummy", "TRAIN=-a resnet50 -b 256 --precision bf16")
    words = "' '".join(["TRAIN=-a", "resnet50", "-b", "256", "--precision", "bf16"])
    assert words in ad["Environment"]  # HTCondor's way of quoting each space


def test_without_data_the_mistake_is_named(condor: ModuleType) -> None:
    answer = condor.run(f"condor_submit {ROOT / 'condor/train.sub'} -dry-run -", check=False)
    assert "no DATA; give a URL (DATA=osdf:///...)" in answer

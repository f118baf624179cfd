"""The flags: pytorch/examples' names, what they are checked for, and their record."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dataset.errors import UserError
from train.config import TrainConfig, parse_config


def test_the_flags_of_pytorch_examples_are_understood() -> None:
    argv = "DATA -a resnet18 --epochs 3 -b 64 --lr 0.2 --momentum 0.8 --wd 1e-5 -j 2 -p 7 --seed 9"
    cfg = parse_config([*argv.split(), "--resume", "x.pt", "-e", "--pretrained"])
    assert (cfg.data, cfg.arch, cfg.epochs, cfg.batch_size) == ("DATA", "resnet18", 3, 64)
    assert (cfg.lr, cfg.momentum, cfg.wd, cfg.workers) == (0.2, 0.8, 1e-5, 2)
    assert (cfg.print_freq, cfg.seed, cfg.resume) == (7, 9, Path("x.pt"))
    assert cfg.evaluate and cfg.pretrained
    argv = "DATA --arch vgg11 --batch-size 8 --workers 1 --weight-decay 0.1"
    long = parse_config(argv.split())
    assert (long.arch, long.batch_size, long.workers, long.wd) == ("vgg11", 8, 1, 0.1)
    assert parse_config(["--dummy"]).data == ""


def test_every_field_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        if field.name != "data":
            names = field.metadata["names"] or ["--" + field.name.replace("_", "-")]
            assert all(name in text for name in names)
        assert field.metadata["help"]
    assert "examples:" in text and "exit codes:" in text


def test_the_fields_that_are_not_given_are_their_defaults() -> None:
    assert parse_config(["DATA"]) == TrainConfig(data="DATA")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *((flag, "0") for flag in ("--epochs", "--batch-size", "--image-size", "--print-freq")),
        *((flag, "0") for flag in ("--microbatch", "--max-steps", "--threads")),
        *((flag, "-1") for flag in ("--batch-size", "--workers", "--seed", "--skip-bad-images")),
        *((flag, "-0.1") for flag in ("--lr", "--wd", "--momentum", "--warmup-epochs", "--ema")),
        *((flag, "nan") for flag in ("--lr", "--wd", "--momentum", "--ema", "--label-smoothing")),
        *((flag, "1") for flag in ("--ema", "--label-smoothing")),
        *((flag, value) for flag in ("--lars-eta", "--lars-eps") for value in ("-0.1", "nan")),
        ("--seed", str(2**63)),
        ("--seed", "99999999999999999999999"),
        *((flag, "0") for flag in ("--checkpoint-minutes", "--timeout-minutes")),
        *((flag, "nan") for flag in ("--checkpoint-minutes", "--timeout-minutes", "--deadline")),
        *((flag, "inf") for flag in ("--checkpoint-minutes", "--timeout-minutes", "--lr", "--wd")),
        *((flag, "99999999999") for flag in ("--threads", "--workers", "--epochs", "--max-steps")),
        *((flag, "99999") for flag in ("--threads", "--workers")),
        ("--timeout-minutes", "10000000.0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_flag(flag: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"{flag} {value}") as refused:
        parse_config(["DATA", f"{flag}={value}"])
    assert "must be" in str(refused.value)


def test_contradictions_and_a_missing_data_are_refused() -> None:
    with pytest.raises(UserError, match="no DATA"):
        parse_config([])
    with pytest.raises(UserError, match="--pretrained and --weights"):
        parse_config(["DATA", "--pretrained", "--weights", "x.pt"])
    for argv in (["DATA"], ["--dummy"], ["https://host/x.tar", "-e"]):
        with pytest.raises(UserError, match="--stream always is for training on the tar of a URL"):
            parse_config([*argv, "--stream", "always"])


def test_data_may_be_two_urls_and_keeps_commas_in_one() -> None:
    assert parse_config(["a,b"]).urls == []
    assert parse_config(["https://host/a,b.tar"]).urls == ["https://host/a,b.tar"]
    two = parse_config(["osdf:///a.tar,https://host/val.tar?sig=123456789", "--index", "i"])
    assert two.urls == ["osdf:///a.tar", "https://host/val.tar?sig=123456789"]
    record = two.as_record()
    assert "123456789" not in record["data"] and record["index"] == "i"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("30m", 1800), ("6h", 21600)])
def test_the_patience_of_a_stream_is_spelled_as_that_of_a_fetch(text: str, seconds: int) -> None:
    assert parse_config(["DATA", "--give-up-after", text]).give_up_s == seconds
    for wrong in ("soon", "0", "-1"):
        with pytest.raises(UserError, match="--give-up-after"):
            parse_config(["DATA", f"--give-up-after={wrong}"])


def test_an_order_may_name_its_lanes() -> None:
    plain, laned = (parse_config(["DATA", "--order", t]) for t in ("streamed", "streamed:4"))
    assert (plain.order_name, plain.order_lanes) == ("streamed", None)
    assert (laned.order_name, laned.order_lanes) == ("streamed", 4)
    for wrong in ("random", "uniform:2", "auto:2", "streamed:", "streamed:0", "streamed:x", ":4"):
        with pytest.raises(UserError, match=f"--order {wrong}: must be one of auto, uniform"):
            parse_config(["DATA", "--order", wrong])


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("500MB", 5e8), ("20GB", 2e10), ("20GiB", 20 * 2**30), ("1.5G", 1.5e9), ("1024", 1024)],
)
def test_the_limit_of_a_cache_is_a_size_and_for_streams(text: str, num_bytes: float) -> None:
    url = "https://host/x.tar"
    assert parse_config([url, "--cache-limit", text]).cache_bytes == num_bytes
    assert parse_config([url]).cache_bytes == 0
    for argv in (["DATA"], ["--dummy"], [url, "-e"], [url, "--stream", "never"]):
        with pytest.raises(UserError, match="--cache-limit is for a training that streams a URL"):
            parse_config([*argv, "--cache-limit", text])
    with pytest.raises(UserError, match="--cache-limit takes --order streamed"):
        parse_config([url, "--cache-limit", text, "--order", "uniform"])
    for wrong in ("much", "0GB", "-1", "20 gallons"):
        with pytest.raises(UserError, match="--cache-limit"):
            parse_config([url, f"--cache-limit={wrong}"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["DATA", "--lr", "fast"], "--lr: invalid float value: 'fast'"),
        (["DATA", "--recipe", "cake"], "--recipe: invalid choice: 'cake'"),
        (["D", "-x"], "unrecognized arguments: -x"),
        (["DATA", "--epochs"], "--epochs: expected one argument"),
    ],
)
def test_what_is_no_flag_or_no_number_is_refused_in_one_line(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as refused:  # run_command prints it and exits 2
        parse_config(argv)
    message = str(refused.value)
    assert words in message and message.endswith("; python -m train --help lists the flags")
    assert "\n" not in message


def test_the_record_holds_every_field_as_json() -> None:
    cfg = parse_config(["DATA", "--output", "a/b", "--resume", "c.pt"])
    record = json.loads(json.dumps(cfg.as_record()))
    assert set(record) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert (record["output"], record["resume"], record["weights"]) == ("a/b", "c.pt", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.lr = 1.0  # type: ignore[misc]

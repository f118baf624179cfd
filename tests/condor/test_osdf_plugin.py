"""The transfer plugin as HTCondor calls it: one file, a bare Python, ClassAds in and out."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from condor import osdf_plugin
from condor.osdf_plugin import FINAL, Order, fetch_all, read_orders, read_settings, to_classad
from dataset.federation.lookup import Options
from dataset.federation.tokens import Access
from scripts import build_plugin
from tests.cluster.osdf.rules import Fault
from tests.dataset.director_server import directing, federation


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "osdf_plugin"
    assert build_plugin.main(["--out", str(path)]) == 0
    return path


def call(
    plugin: Path, folder: Path, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Calls it in a job's sandbox, isolated from this project and its packages."""
    command: list[str | Path] = [sys.executable, "-I", "-S", plugin, *arguments]
    bare = {"PATH": os.environ["PATH"], "_CONDOR_JOB_AD": str(folder / ".job.ad")}
    return subprocess.run(
        command, cwd=folder, env=bare | env, capture_output=True, text=True, timeout=280
    )


def transfer(
    plugin: Path,
    folder: Path,
    osdf: ModuleType,
    *urls: str,
    minutes: float = 50,
    upload: bool = False,
    **env: str,
) -> tuple[int, list[dict[str, str]]]:
    """The exit code and the result of each file; `a`, `b` ... in the folder are the targets."""
    ad = f'PluginMinutes = {minutes}\nPluginFederation = "{osdf.DIRECTOR_HTTP_URL}"\n'
    (folder / ".job.ad").write_text(ad)
    orders = [
        f'[ Url = "{url}"; LocalFileName = "{folder}/{name}" ]\n'
        for url, name in zip(urls, "abcdef", strict=False)
    ]
    (folder / "in").write_text("".join(orders))
    words = ["-infile", "in", "-outfile", "out", *(["-upload"] if upload else [])]
    done = call(plugin, folder, *words, **env)
    answers = re.findall(r"\[ (.*) \]", (folder / "out").read_text())
    pattern = re.compile(r'(\w+) = (?:"((?:[^"\\]|\\.)*)"|([^;]*));')
    results = [{m[1]: m[2] or m[3] or "" for m in pattern.finditer(a)} for a in answers]
    return done.returncode, results


def test_it_says_what_it_can_do(plugin: Path, tmp_path: Path) -> None:
    done = call(plugin, tmp_path, "-classad")
    assert done.returncode == 0
    assert 'SupportedMethods = "osdf,pelican"' in done.stdout
    assert "MultipleFileSupport = true" in done.stdout


def test_it_runs_as_a_program(plugin: Path) -> None:
    assert subprocess.run([plugin, "-classad"], capture_output=True).returncode == 0


def test_wrong_arguments_are_exit_1(plugin: Path, tmp_path: Path) -> None:
    for arguments in ([], ["-infile", "x"], ["-help"]):
        done = call(plugin, tmp_path, *arguments)
        assert (done.returncode, done.stderr[:6]) == (1, "usage:")


def test_the_same_sources_give_the_same_bytes(plugin: Path, tmp_path: Path) -> None:
    build_plugin.main(["--out", str(tmp_path / "again")])
    assert (tmp_path / "again").read_bytes() == plugin.read_bytes()


def test_nothing_in_it_needs_more_than_python_3_9_and_its_library(plugin: Path) -> None:
    with zipfile.ZipFile(plugin) as archive:
        names = archive.namelist()
        trees = [ast.parse(archive.read(n), n, feature_version=(3, 9)) for n in names]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    newer = [k.arg for c in calls for k in c.keywords if k.arg in ("strict", "slots", "kw_only")]
    assert newer == []
    unions = [c for c in calls if getattr(c.func, "id", "") in ("isinstance", "issubclass")]
    assert not any(isinstance(argument, ast.BinOp) for c in unions for argument in c.args)
    modules = {n.module for t in trees for n in t.body if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for t in trees for n in t.body if isinstance(n, ast.Import) for a in n.names}
    tops = {str(module).partition(".")[0] for module in modules}
    assert tops - set(sys.stdlib_module_names) == {"dataset"}


def test_orders_are_read_with_quotes_and_brackets_in_them() -> None:
    text = '[ Url = "osdf:///ns/a[1].tar"; LocalFileName = "/s/a \\"x\\".tar" ]\n'
    text += '[ LocalFileName = "/s/b"; Url = "osdf:///ns/b" ][Url="osdf:///ns/c"]'
    orders = [(order.url, str(order.path)) for order in read_orders(text)]
    assert orders[:2] == [
        ("osdf:///ns/a[1].tar", '/s/a "x".tar'),
        ("osdf:///ns/b", "/s/b"),
    ]
    assert orders[2] == ("osdf:///ns/c", str(Path("c").absolute()))


def test_settings_come_from_the_jobs_ad(tmp_path: Path) -> None:
    (tmp_path / "ad").write_text('Cmd = "a \\"b\\""\nPluginMinutes = 0.5\nPluginFederation = ""\n')
    settings = read_settings({"_CONDOR_JOB_AD": str(tmp_path / "ad")})
    assert settings == {"cmd": 'a "b"', "pluginminutes": "0.5", "pluginfederation": ""}


def test_values_are_written_as_classads() -> None:
    values = [to_classad(value) for value in (True, 3, 'a "quoted" \\ text')]
    assert values == ["true", "3", '"a \\"quoted\\" \\\\ text"']


def fail_in_process(folder: Path, url: str, federation: str) -> dict[str, Any]:
    """What HTCondor is told about one file, by the plugin's own functions."""
    (folder / ".job.ad").write_text(f'PluginMinutes = 0.04\nPluginFederation = "{federation}"\n')
    environ = {"_CONDOR_JOB_AD": str(folder / ".job.ad"), "XDG_RUNTIME_DIR": "/nonexistent"}
    (result,) = fetch_all([Order(url, folder / "a")], environ)
    return result


@pytest.mark.parametrize(
    ("url", "status", "is_final"),
    [
        ("osdf:///ns/a.tar", 404, True),
        ("osdf:///ns/a.tar?unknown", 404, True),
        ("osdf:///ns/a.tar", 403, False),  # another token may come
        ("osdf:///ns/a.tar", 503, False),
    ],
)
def test_only_a_mistake_that_nothing_mends_says_that_it_is_not_tried_again(
    url: str, status: int, is_final: bool, tmp_path: Path
) -> None:
    with directing(lambda handler: (status, {})) as federation:
        result = fail_in_process(tmp_path, url, federation)
    assert result["TransferSuccess"] is False
    assert result["TransferError"].startswith(FINAL) is is_final


def test_the_submit_file_leaves_a_final_mistake_held() -> None:
    text = (build_plugin.ROOT / "condor/train.sub").read_text()
    assert f'regexp("{FINAL}", HoldReason) =!= true' in text


@pytest.mark.osdf
def test_files_arrive_and_nothing_else_is_left(
    plugin: Path, tmp_path: Path, osdf: ModuleType
) -> None:
    contents = [os.urandom(3_000_000), b"small"]
    urls = [f"osdf://{osdf.put(f'plugin/{os.urandom(4).hex()}', c)}" for c in contents]
    code, results = transfer(plugin, tmp_path, osdf, *urls)
    assert code == 0
    assert [(tmp_path / name).read_bytes() for name in "ab"] == contents
    assert {p.name for p in tmp_path.iterdir()} == {".job.ad", "in", "out", "a", "b"}
    assert [(r["TransferSuccess"], r["TransferTotalBytes"]) for r in results] == [
        ("true", "3000000"),
        ("true", "5"),
    ]
    assert [r["TransferUrl"] for r in results] == urls
    assert [r["TransferFileName"] for r in results] == [f"{tmp_path}/a", f"{tmp_path}/b"]


@pytest.mark.osdf
def test_a_stalling_cache_is_survived(plugin: Path, tmp_path: Path, osdf: ModuleType) -> None:
    content = os.urandom(5_000_000)
    path = osdf.put(f"plugin/{os.urandom(4).hex()}", content)
    with osdf.faults(Fault("stall", path=path, server="cache1", after_share=0.3)) as faults:
        code, _ = transfer(plugin, tmp_path, osdf, f"osdf://{path}")
        assert sum(faults.hits()) > 0
    assert code == 0
    assert (tmp_path / "a").read_bytes() == content


def test_later_files_get_what_is_left_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file takes 4 s of a limit of 6 s, by a clock of the test."""
    clock, limits = [100.0], []

    def take_long(_order: Order, _federation: None, _access: Access, options: Options) -> int:
        clock[0] += 4.0
        limits.append((options.give_up_s, options.deadline_s))
        return 1

    own_time = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0])
    monkeypatch.setattr(osdf_plugin, "time", own_time)
    monkeypatch.setattr(osdf_plugin, "fetch_one", take_long)
    (tmp_path / ".job.ad").write_text("PluginMinutes = 0.1\n")
    orders = [Order("osdf:///ns/object", tmp_path / name) for name in "abc"]
    results = fetch_all(orders, {"_CONDOR_JOB_AD": str(tmp_path / ".job.ad"), "HOME": "/"})
    assert limits == [pytest.approx((5.4, 5.4)), pytest.approx((1.8, 1.8))]
    assert [result["TransferSuccess"] for result in results] == [True, True, False]
    assert results[2]["TransferError"] == "c did not arrive within 0.1 minutes"


@pytest.mark.osdf
def test_it_fails_by_its_limit_when_every_source_stalls(
    plugin: Path, tmp_path: Path, osdf: ModuleType
) -> None:
    paths = [osdf.put(f"plugin/{os.urandom(4).hex()}", os.urandom(1_000_000)) for _ in "ab"]
    with osdf.faults(*(Fault("stall", path=path, after_share=0.3) for path in paths)):
        code, results = transfer(
            plugin, tmp_path, osdf, *(f"osdf://{path}" for path in paths), minutes=0.1
        )
    assert code == 1
    assert [r["TransferSuccess"] for r in results] == ["false", "false"]
    for result in results:  # by the engine, or where the machine is too busy by the alarm
        words = r"no byte of \S+ for \d+ s|did not arrive within (\d+ s|0\.1 minutes)"
        assert re.search(words, result["TransferError"])
        assert result["TransferRetryable"] == "true"


@pytest.mark.osdf
def test_one_missing_file_fails_the_call_and_is_named(
    plugin: Path, tmp_path: Path, osdf: ModuleType
) -> None:
    path = osdf.put(f"plugin/{os.urandom(4).hex()}", b"here")
    urls = ["osdf:///public/plugin/never-made", f"osdf://{path}"]
    code, results = transfer(plugin, tmp_path, osdf, *urls, minutes=0.5)
    assert code == 1
    assert [r["TransferSuccess"] for r in results] == ["false", "true"]
    assert "never-made" in results[0]["TransferError"]
    assert results[0]["TransferUrl"] == urls[0]


@pytest.mark.osdf
def test_uploads_are_refused(plugin: Path, tmp_path: Path, osdf: ModuleType) -> None:
    (tmp_path / "a").write_text("result")
    code, results = transfer(plugin, tmp_path, osdf, "osdf:///public/x", upload=True)
    assert code == 1
    assert results[0]["TransferError"].startswith("uploads are not supported")
    assert results[0]["TransferUrl"] == "osdf:///public/x"


@pytest.mark.osdf
def test_no_token_is_in_what_htcondor_is_told(
    plugin: Path, tmp_path: Path, osdf: ModuleType
) -> None:
    token = osdf.make_token(lifetime_s=-60)
    path = osdf.put(f"plugin/{os.urandom(4).hex()}", b"secret", namespace=osdf.PROTECTED)
    code, results = transfer(
        plugin, tmp_path, osdf, f"osdf://{path}", minutes=0.5, BEARER_TOKEN=token
    )
    assert code == 1
    assert "the token expired at" in results[0]["TransferError"]
    code, results = transfer(plugin, tmp_path, osdf, f"osdf://{path}?authz=Bearer%20{token}")
    assert code == 1
    for text in (token, token.split(".")[1]):
        assert text not in (tmp_path / "out").read_text()
    assert results[0]["TransferUrl"].endswith("authz=[removed]")


def run_here(folder: Path, settings: str, url: str = "osdf:///object.bin") -> tuple[int, str]:
    """The exit code and the answers of a call in this process."""
    (folder / ".job.ad").write_text(settings)
    order = f'[ Url = "{url}"; LocalFileName = "{folder}/a" ]'
    (folder / "in").write_bytes(order.encode("latin-1"))
    words = ["-infile", str(folder / "in"), "-outfile", str(folder / "out")]
    code = osdf_plugin.main(words, {"_CONDOR_JOB_AD": str(folder / ".job.ad"), "HOME": "/"})
    return code, (folder / "out").read_text(errors="surrogateescape")


@pytest.mark.parametrize("minutes", ["abc", "-1", "0", "1e400", "nan", "9" * 5000, '"²"'])
def test_a_limit_that_is_no_number_is_told_for_every_file(minutes: str, tmp_path: Path) -> None:
    code, answers = run_here(tmp_path, f"PluginMinutes = {minutes}\n")
    assert code == 1
    assert "PluginMinutes" in answers and "TransferRetryable = false" in answers
    assert len(answers) < 1000


def test_an_address_that_is_no_text_is_told(tmp_path: Path) -> None:
    code, answers = run_here(tmp_path, "", url="osdf:///a\xe9\xff?x=1")
    assert code == 1 and "TransferSuccess = false" in answers


def test_a_file_of_the_job_called_as_our_record_stays(tmp_path: Path) -> None:
    (tmp_path / "fetched.jsonl").write_text("the job's own\n")
    with federation([b"content"]) as (director, *_):
        code, answers = run_here(tmp_path, f'PluginFederation = "{director}"\n')
    assert code == 0, answers
    assert (tmp_path / "a").read_bytes() == b"content"
    assert (tmp_path / "fetched.jsonl").read_text() == "the job's own\n"
    assert {p.name for p in tmp_path.iterdir()} == {".job.ad", "in", "out", "a", "fetched.jsonl"}

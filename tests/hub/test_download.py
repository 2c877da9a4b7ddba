"""Fetching: the needed files and no others, into the library's cache; and every way in which that fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import convert
from convert.errors import ConvertError
from tests.fixtures.ggml import make_gguf
from tests.fixtures.hf import make_hf
from tests.fixtures.meta import make_meta
from tests.hub.conftest import files_of, put
from tests.hub.server import Fault

ROOT = Path(__file__).resolve().parents[2]


def got(hub, part: str = "") -> set[str]:
    """Names of the files that were fetched."""
    return {r.path.rsplit("/", 1)[-1] for r in hub.find(lambda r: "/resolve/" in r.path and r.method == "GET")}


def test_a_name_is_as_good_as_a_folder(hub, tmp_path):
    make_hf(tmp_path / "m", sharded=3, tokenizer=True)
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + b"x" * 9000)
    (tmp_path / "m" / "flax_model.msgpack").write_bytes(b"x" * 9000)
    put(hub, "org/tiny", tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    make_hf(tmp_path / "m", sharded=3, tokenizer=True)
    convert.convert_checkpoint("org/tiny", "out", to="scratch")
    convert.convert_checkpoint("m", "wanted", to="scratch")
    assert files_of(Path("out")) == files_of(Path("wanted"))
    fetched = {p.name for p in (tmp_path / "cache").glob("models--org--tiny/snapshots/*/*")}
    assert fetched == {p.name for p in (tmp_path / "m").iterdir()}  # neither .bin nor msgpack
    record = json.loads(Path("out/conversion.json").read_text())
    assert record["source"]["hub"] == {"repo": "org/tiny", "commit": hub.repos["org/tiny"].sha()}
    assert not any(r.authorized for r in hub.log)

    hub.log.clear()  # the second time everything is there
    convert.convert_checkpoint("org/tiny", "out2", to="scratch")
    assert not hub.find(lambda r: "cdn" in r.path)
    assert convert.check("out2", source="org/tiny").ok


def test_every_door_takes_a_name(hub, tmp_path, cli):
    make_hf(tmp_path / "m", "gqa8", tokenizer=True)
    put(hub, "org/tiny", tmp_path / "m")
    convert.convert_checkpoint("org/tiny", "out", to="scratch")
    assert cli("validate", "org/tiny", "--scan")[0] == 0
    assert cli("diff", "org/tiny", "m", "--quiet")[0] == 0
    assert cli("verify", "org/tiny", "out", "--quiet")[0] in (0, 3)
    assert cli("check", "out", "--source", "org/tiny", "--quiet")[0] == 0
    assert cli("generate", "org/tiny", "--prompt", "a", "--max-tokens", "2")[0] in (0, 2)
    assert convert.open_checkpoint(Path("org/tiny")).title == "org/tiny"
    assert convert.load_scratch_config("org/tiny")["n_layers"] == 2


def test_meta_takes_original(hub, tmp_path):
    make_hf(tmp_path / "m", "gqa8")
    made = make_meta(tmp_path / "m" / "original", "gqa8")
    put(hub, "org/both", tmp_path / "m")
    with convert.open_checkpoint("org/both", layout="meta") as meta, convert.open_checkpoint("org/both") as hf:
        assert (meta.layout, hf.layout) == ("meta", "hf")
        assert meta.folder.name == "original" and made is not None
    assert not list((tmp_path / "cache").glob("**/original/model.safetensors"))
    with convert.open_checkpoint("hf://org/both/original") as meta:
        assert meta.layout == "meta"


def test_one_of_many_gguf_files(hub, tmp_path, cli):
    for kind in ("f16", "q8_0"):
        make_gguf(tmp_path / "m" / f"tiny-{kind}.gguf", "gqa8", type=kind)
    put(hub, "org/tiny-GGUF", tmp_path / "m")
    with pytest.raises(ConvertError, match=r"2 sets of weights.*tiny-f16.gguf.*Name one: hf://org/tiny-GGUF/tiny-"):
        convert.open_checkpoint("org/tiny-GGUF")
    with convert.open_checkpoint("hf://org/tiny-GGUF/tiny-q8_0.gguf") as one:
        assert one.dtype == "Q8_0"
    assert not list((tmp_path / "cache").glob("**/tiny-f16.gguf"))
    assert cli("inspect", "hf://org/tiny-GGUF@main/tiny-f16.gguf", "--quiet")[0] == 0


def test_a_folder_of_that_name_wins(hub, tmp_path, cli):
    make_hf(tmp_path / "org" / "tiny", "gqa8")
    code, out, _ = cli("inspect", "org/tiny")
    assert code == 0 and "no repository of that name was looked for" in out
    assert hub.log == []
    code, _, err = cli("inspect", "org/other")  # its parent is there: a slip, not a name
    assert (code, hub.log) == (2, []) and "does not exist" in err


def test_revisions(hub, tmp_path):
    make_hf(tmp_path / "m", "gqa8")
    repo = put(hub, "org/tiny", tmp_path / "m", tags=("v1",))
    for name in (f"org/tiny@{repo.sha()}", "org/tiny@v1"):
        with convert.open_checkpoint(name) as opened:
            assert opened.origin["commit"] == repo.sha()
    with pytest.raises(ConvertError, match="no revision 'v2'") as error:
        convert.open_checkpoint("org/tiny@v2")
    assert error.value.problems[0].kind == "hub_revision" and error.value.exit_code == 1


def test_missing_misspelt_private_gated(hub, tmp_path, monkeypatch):
    make_hf(tmp_path / "m", "gqa8")
    put(hub, "org/tiny-model", tmp_path / "m")
    put(hub, "org/secret", tmp_path / "m", private=True)
    put(hub, "org/gated", tmp_path / "m", gated=True)

    def kind(name: str) -> tuple[str, str]:
        with pytest.raises(ConvertError) as error:
            convert.open_checkpoint(name)
        assert len(error.value.problems) == 1 and error.value.exit_code == 1
        return error.value.problems[0].kind, str(error.value)

    found, text = kind("org/tiny-modle")
    assert found == "hub_missing" and "org/tiny-model" in text and "no local path" in text
    found, text = kind("org/secret")
    assert found == "hub_missing" and "HF_TOKEN" in text
    assert "org/secret" not in kind("org/secert")[1].split("Names near")[-1]
    found, text = kind("org/gated")
    assert found == "hub_gated" and f"{hub.url}/org/gated" in text
    with pytest.raises(ConvertError, match="gated"):
        convert.inspect("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_good")  # and with the right token all of them open
    for name in ("org/secret", "org/gated"):
        convert.open_checkpoint(name).close()
    assert hub.find(lambda r: r.authorized and "/resolve/" in r.path)
    assert not hub.find(lambda r: r.authorized and "/cdn/" in r.path)  # the token stays on the Hub's own host
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert kind("org/gated")[0] == "hub_gated"
    hub.faults = [Fault("/api/models/org/tiny-model", 9, status=403)]
    assert kind("org/tiny-model")[0] == "hub_forbidden"


@pytest.mark.parametrize("status", [429, 503])
def test_busy_then_not(hub, tmp_path, status):
    make_hf(tmp_path / "m", "gqa8")
    put(hub, "org/tiny", tmp_path / "m")
    hub.faults = [Fault("/api/models/org/tiny", 2, status=status, headers={"Retry-After": "0"})]
    convert.open_checkpoint("org/tiny").close()
    assert not hub.faults[0].times
    hub.faults = [Fault("/api/models/org/tiny", 99, status=status, headers={"Retry-After": "600"})]
    with pytest.raises(ConvertError) as error:
        convert.inspect("org/tiny")
    assert error.value.problems[0].kind == ("hub_rate_limited" if status == 429 else "hub_busy")
    assert hub.faults[0].times == 98  # ten minutes are not waited for


def test_offline_and_unreachable(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    make_hf(tmp_path / "m", "gqa8")
    put(hub, "org/tiny", tmp_path / "m")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConvertError, match="not in the cache, and HF_HUB_OFFLINE"):
        convert.open_checkpoint("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    convert.open_checkpoint("org/tiny").close()
    hub.log.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with convert.open_checkpoint("org/tiny") as opened:
        assert any("offline" in n for n in opened.notes)
    assert hub.log == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    with convert.open_checkpoint("org/tiny") as opened:
        assert any("cannot be reached" in n for n in opened.notes)
    with pytest.raises(ConvertError, match=r"cannot be reached.*HF_ENDPOINT"):
        convert.open_checkpoint("org/other")


def test_wrong_bytes_do_not_stay(hub, tmp_path):
    make_hf(tmp_path / "m", "gqa8")
    put(hub, "org/tiny", tmp_path / "m")
    hub.faults = [Fault("/cdn/", 1, flip=200_000)]
    with pytest.raises(ConvertError, match=r"SHA-256.*removed from the cache") as error:
        convert.open_checkpoint("org/tiny")
    assert error.value.problems[0].kind == "hub_damaged"
    convert.open_checkpoint("org/tiny").close()  # fetched anew, and right
    assert convert.validate("org/tiny", hashes=True).ok


def test_a_cut_download_goes_on(hub, tmp_path):
    make_hf(tmp_path / "m", "gqa8")
    put(hub, "org/tiny", tmp_path / "m")
    hub.faults = [Fault("/cdn/", 2, cut=100_000)]
    convert.convert_checkpoint("org/tiny", "out", to="scratch")
    assert len(hub.find(lambda r: "/cdn/" in r.path and r.method == "GET")) == 3
    convert.convert_checkpoint("m", "wanted", to="scratch")
    assert files_of(Path("out")) == files_of(Path("wanted"))


def test_disk_full(hub, tmp_path, monkeypatch):
    import collections

    make_hf(tmp_path / "m", "gqa8")
    put(hub, "org/tiny", tmp_path / "m")
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6, 1000))
    with pytest.raises(ConvertError, match=r"HF_HOME.*--no-download") as error:
        convert.open_checkpoint("org/tiny")
    assert error.value.problems[0].kind == "hub_disk_full"
    assert not hub.find(lambda r: "/cdn/" in r.path)


def test_what_is_refused_is_refused_before_the_download(hub, tmp_path):
    make_hf(tmp_path / "m", sharded=2)
    put(hub, "org/m", tmp_path / "m")
    with pytest.raises(ConvertError, match="tokenizer") as error:
        convert.convert_checkpoint("org/m", "out.gguf", to="gguf")
    assert "org/m" in str(error.value) and "/tmp" not in str(error.value).replace(str(tmp_path), "")
    with pytest.raises(ConvertError, match="org/m is in the hf layout, not meta"):
        convert.plan_conversion("org/m", "hf", source_layout="meta")
    size = sum(len(d) for p, d in hub.repos["org/m"].files.items() if p.endswith(".safetensors"))
    assert sum(r.sent for r in hub.log if "/cdn/" in r.path) < 0.9 * size
    assert not list((tmp_path / "cache").glob("**/*.safetensors"))
    convert.convert_checkpoint("org/m", "out.gguf", to="gguf", tokenizer=False)


def test_a_disk_that_fills_up(hub, tmp_path, monkeypatch):
    import errno

    import huggingface_hub

    make_hf(tmp_path / "m")
    put(hub, "org/m", tmp_path / "m")

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ConvertError, match="too full") as error:
        convert.open_checkpoint("org/m")
    assert [p.kind for p in error.value.problems] == ["hub_disk_full"] and hub.sent < 10_000


def test_a_token_that_is_none(hub, tmp_path):
    make_hf(tmp_path / "m")
    put(hub, "org/m", tmp_path / "m")
    headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
    hub.faults = [Fault("/api/models/org/m", 1, status=401, headers=headers)]
    with pytest.raises(ConvertError, match="does not know the token"):
        convert.open_checkpoint("org/m")


def test_how_long_a_server_asks_to_wait():
    from email.utils import formatdate

    from convert.hub.failures import retry_after

    assert retry_after({"Retry-After": "7"}) == 7
    assert 50 < retry_after({"Retry-After": formatdate(time.time() + 60, usegmt=True)}) <= 60
    assert retry_after({"Retry-After": formatdate(time.time() - 60, usegmt=True)}) == 0
    assert retry_after({"Retry-After": "soon"}) is None and retry_after({}) is None


def test_as_a_program_with_the_library_s_environment(hub, tmp_path):
    """Another process: HF_ENDPOINT, HF_HOME and HF_TOKEN are all it is told."""
    make_hf(tmp_path / "m", tokenizer=True)
    put(hub, "org/m", tmp_path / "m", private=True)
    told = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | told | {"PYTHONPATH": str(ROOT)}

    def call(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "convert", *args]
        return subprocess.run(command, env=env | more, cwd=tmp_path, capture_output=True, text=True, check=False)

    without = call("hf-to-scratch", "org/m", "out", "--json")
    assert without.returncode == 1 and json.loads(without.stdout)["problems"][0]["kind"] == "hub_missing"
    done = call("hf-to-scratch", "org/m", "out", "--json", HF_TOKEN="hf_good")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(done.stdout)["tensors"] > 10
    assert list((tmp_path / "home" / "hub").glob("models--org--m/blobs/*"))
    offline = call("inspect", "org/m", "--json", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and "offline" in offline.stdout


def test_a_path_costs_nothing(tmp_path):
    """The library is not even imported where no name is given."""
    make_hf(tmp_path / "m")
    code = (
        "import sys, convert; convert.inspect('m'); convert.convert_checkpoint('m', 'out', to='scratch'); "
        "sys.exit(any(n.split('.')[0] in ('huggingface_hub', 'httpx', 'httpx2', 'requests') for n in sys.modules))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=False).returncode == 0


def test_metadata_of_a_file_there(hub, tmp_path, cli):
    make_gguf(tmp_path / "m" / "tiny.gguf")
    put(hub, "org/m", tmp_path / "m")
    code, out, _ = cli("metadata", "hf://org/m/tiny.gguf", "--json")
    assert code == 0 and out == cli("metadata", "m/tiny.gguf", "--json")[1]
    assert cli("metadata", "hf://org/m/tiny.gguf", "--set", "a.b=c")[0] == 2

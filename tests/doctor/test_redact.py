"""Nothing private in a report: names, paths, tokens and addresses are written into every field, and the report is
searched for them.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.doctor import report_file
from lora_rocm.doctor.report_file import without_private
from lora_rocm.errors import StorageError
from lora_rocm.foundation.redact import Private, private_of, texts_in
from lora_rocm.hardware.facts import HostFacts, Library, Unread, facts_from_json
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict
from lora_rocm.rules.mitigation_records import Kept, Workload
from lora_rocm.rules.this_machine import situation_here
from tests.doctor.injections import HEALTHY, LINUX, STACK, WINDOWS, case, facts_of, remembering
from tests.golden import machines

SECRETS = {
    "hub token": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "github token": "ghp_0123456789abcdefghijABCDEFGHIJ456789",
    "cloud key": "AKIAIOSFODNN7EXAMPLE",
    "e-mail": "joerg.mueller@firma-mueller.example",
    "mac": "3c:7c:3f:12:ab:cd",
    "uuid": "4c4c4544-0044-4d10-8051-b7c04f503332",
    "sid": "S-1-5-21-1004336348-1177238915-682003330-1001",
    "address": "192.168.178.23",
    "login": "jmue:hunter2",
    "serial": "PF3XK9QZ",
    "long key": "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZmdoaWprbG1ub3BxcnN0dXY",
}
CONTEXT = {
    "login": "https://{}@host.example/x",
    "serial": "Serial Number: {}",
}


def planted(text: str) -> HostFacts:
    """Facts with ``text`` in every field that holds free text."""
    linux = LINUX.linux
    assert linux is not None and LINUX.torch is not None
    return replace(
        LINUX,
        origin=text,
        cpu=f"AMD Ryzen {text}",
        gpus=(replace(LINUX.gpus[0], name=f"Radeon {text}", driver=text, driver_product=text),),
        linux=replace(
            linux,
            kernel=f"6.17.9 {text}",
            amdgpu_version=text,
            rocm_version=text,
            firmware_package=text,
            boot_parameters={"amdgpu.x": text},
            kernel_log=(f"amdgpu: {text} ring gfx timeout {text}",),
        ),
        torch=replace(LINUX.torch, version=f"2.13.0 {text}", hip=f"7.2 {text}"),
        libraries={"torchvision": text},
        variables={
            "LD_LIBRARY_PATH": f"/opt/rocm/lib:{text}",
            "MIOPEN_USER_DB_PATH": text,
            "PYTORCH_HIP_ALLOC_CONF": text,
        },
        unread=(Unread(text, text), Unread(f"a {text}, b", f"'{text}'")),
    )


def planted_windows(text: str) -> HostFacts:
    assert WINDOWS.windows is not None
    windows = replace(WINDOWS.windows, hip_libraries=(Library(text, text),), hip_path=text, product=text)
    return replace(WINDOWS, windows=windows, variables={"HIP_PATH": text, "PATH": f"C:\\Windows;{text};D:\\x"})


def written(facts: HostFacts, detail: str = "") -> str:
    situation, _ = case(facts, SelftestVerdict(STACK, (Result("gemm.x", "failed", 0.1, detail),)))
    situation = replace(situation, app_dir=f"{situation.app_dir}/{detail}")
    return report_file.report(without_private(situation), live=False)


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize("make", [planted, planted_windows])
def test_secrets_are_removed_from_every_field(kind: str, make: object) -> None:
    secret = SECRETS[kind]
    text = CONTEXT.get(kind, "{}").format(secret)
    out = written(make(text), text)  # type: ignore[operator]
    assert secret.lower() not in out.lower()
    assert "Radeon" in out


NAMES = ["jmueller", "Jörg Müller", "o'neil", "x_y-z", "李小龍", "Zoë.K", "anna maria"]
WINDOWS_PATHS = [
    "C:\\Users\\{}\\AppData\\Local\\x",
    "c:/users/{}/x",
    "C:\\\\Users\\\\{}\\\\x",
    "\\\\?\\C:\\Users\\{}\\x",
    "D:\\Documents and Settings\\{}\\x",
    "/mnt/c/Users/{}/x",
    "/c/Users/{}/x",
    "C:\\Users\\{}",
]
POSIX_PATHS = ["/home/{}/x", "/home/{}", "/var/home/{}/venv/lib", "/Users/{}/x", "/run/media/{}/disk/x", "~{}/x"]
CASES = [(path, name) for path in WINDOWS_PATHS for name in NAMES if "'" not in name] + [
    (path, name) for path in POSIX_PATHS for name in NAMES if " " not in name and "'" not in name
]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_user_names_are_removed_with_their_paths_and_alone(path: str, name: str) -> None:
    text = path.format(name)
    for facts in (planted(text), planted_windows(text)):
        facts = replace(facts, unread=(*facts.unread, Unread("owner", f"{name.upper()} is the owner of x_{name}")))
        out = written(facts, text)
        assert name.casefold() not in out.casefold()
        for word in (word for word in name.split() if len(word) > 3):
            assert word.casefold() not in out.casefold()


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_encoded_and_decomposed_names_are_removed(form: str) -> None:
    name = unicodedata.normalize(form, "Jörg Müller")  # type: ignore[arg-type]
    uri = f"file:///C:/Users/{quote(name)}/x and C:\\Users\\{name}\\y and {quote(quote(name))}"
    out = written(planted(uri), uri)
    for left in ("örg", "üller", quote(name), quote(name).lower(), "%25C3"):
        assert unicodedata.normalize("NFC", left) not in unicodedata.normalize("NFC", out)


@given(st.text(st.characters(categories=["Ll", "Lu", "Nd"], max_codepoint=0x24F), min_size=5, max_size=16))
def test_any_user_name_is_removed(name: str) -> None:
    name = f"q{unicodedata.normalize('NFC', name)}q"
    private = private_of({"USER": name, "HOME": f"/data/people/{name}"}, "", [])
    texts = [f"/data/people/{name}/x", f"/home/{name}", f"a {name.upper()} b", f"C:\\Users\\{name}\\x", f"x-{name}_y"]
    for text in texts:
        assert name.casefold() not in private.text(text).casefold()
        assert name.casefold() not in private.path_list(text).casefold()


def test_the_names_of_this_machine_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "TURM-7.intern.example")
    for name, value in {"USERNAME": "Zaphod", "USERDOMAIN": "HERZAUSGOLD", "HOME": "/srv/zaphods"}.items():
        monkeypatch.setenv(name, value)
    text = "zaphod at turm-7, HERZAUSGOLD\\zaphod, /srv/zaphods/x, \\\\nas-3\\share\\x"
    out = written(planted(text), text)
    for word in ("zaphod", "turm-7", "herzausgold", "nas-3"):
        assert word not in out.lower()


SECRET_WORDS = ("Tr0ub4dor", "c0rrect h0rse", "87654321")


@pytest.mark.parametrize("secret", SECRET_WORDS)
def test_a_secret_without_a_known_form_in_every_variable_and_path(
    secret: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only known values leave the machine: unlisted variables stay here, with any content."""
    names = ("HSA_ENABLE_SDMA", "MIOPEN_FIND_MODE", "PYTORCH_HIP_ALLOC_CONF", "ROCM_PATH", "HIP_PATH", "NCCL_DEBUG")
    for name in names:
        monkeypatch.setenv(name, secret)
    every = {**dict.fromkeys(names, secret), "PYTORCH_ALLOC_CONF": f"expandable_segments:True,{secret}:1"}
    every |= {"LD_LIBRARY_PATH": f"/opt/rocm/lib:/srv/{secret}/lib:{secret}", "MIOPEN_USER_DB_PATH": f"/mnt/{secret}"}
    situation, _ = case(replace(LINUX, variables=every))
    situation = replace(situation, environ={**situation.environ, **every}, app_dir=f"/srv/{secret}/app")
    out = report_file.report(without_private(situation), live=False)
    assert secret not in out and not [word for word in secret.split() if word in out]
    assert "expandable_segments:True,<value>" in out and "/opt/rocm/lib:<path>" in out


@pytest.mark.parametrize(
    "value",
    [
        *("0", "1.5", "11.0.0", "gfx1100", "gfx90a:xnack-", "0xFF", "True", "FAST", "4096", "INFO,GRAPH"),
        *("expandable_segments:True,max_split_size_mb:128", "garbage_collection_threshold:0.8", "/opt/rocm-6.4.0/lib"),
        *("/opt/rocm/lib:/usr/lib", "C:\\Program Files\\AMD\\ROCm\\6.4\\"),
    ],
)
def test_values_that_rocm_knows_stay(value: str) -> None:
    assert Private().setting(value) == value


def test_folders_outside_the_system_are_removed_from_variables() -> None:
    facts = replace(LINUX, variables={"LD_LIBRARY_PATH": "/opt/rocm/lib:/mnt/kunden/acme:/usr/lib"})
    out = written(facts)
    assert "acme" not in out and "/opt/rocm/lib:<path>:/usr/lib" in out


@pytest.mark.parametrize("machine", machines())
def test_what_is_public_stays(machine: str) -> None:
    """Negative control: the facts of a machine on which nothing is private come through unchanged."""
    facts = facts_of(machine)
    situation = without_private(situation_here(facts=facts))
    assert situation.facts == facts


def test_common_names_are_left_in_texts() -> None:
    private = private_of({"USER": "root", "HOME": "/root"}, "localhost", ["/home/user/x"])
    assert private.text("groups: root; /home/user/x; AMD GPU of user") == "groups: root; <home>/x; AMD GPU of user"


def test_versions_and_bus_addresses_are_no_addresses() -> None:
    assert Private().text("32.0.15.1 and 6.6.87.2-microsoft") == "32.0.15.1 and 6.6.87.2-microsoft"
    assert Private().text("amdgpu 0000:03:00.0: 7.2.53211") == "amdgpu 0000:03:00.0: 7.2.53211"


def test_the_machine_of_a_report_can_be_read_again() -> None:
    import json

    text = written(planted("/home/jmueller/x"))
    block = text.split("## Machine (for --facts)")[1].split("```")[1]
    assert facts_from_json(json.loads(block), "report").gpus[0].gfx == "gfx1100"


@pytest.mark.parametrize("machine", HEALTHY)
def test_a_report_has_all_its_parts(machine: str, tmp_path: Path) -> None:
    situation, _ = case(HEALTHY[machine])
    path = tmp_path / "ein Ordner" / "bericht ä.md"
    report_file.write_report(path, situation, live=False)
    text = path.read_text(encoding="utf-8")
    for part in ("Result", "Findings", "Versions", "Plan", "Self-test", "Machine"):
        assert f"## {part}" in text
    assert list(path.parent.iterdir()) == [path]


def test_an_unwritable_place_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(StorageError) as caught:
        report_file.write_report(tmp_path / "file" / "report.md", case(LINUX)[0], live=False)
    assert "file" in str(caught.value) and "fix:" in str(caught.value)


def test_texts_are_found_in_every_corner() -> None:
    assert "found me" in list(texts_in(planted("found me")))


def test_bytes_that_are_no_text_do_not_stop_the_report(tmp_path: Path) -> None:
    situation = case(replace(LINUX, cpu="\udcffx\x1b[2J", variables={"HIP_PATH": "\udcffx\x1b[2J"}))[0]
    report_file.write_report(tmp_path / "r.md", situation, live=False)
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert r"\udcffx" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("text", "gone", "stays"),
    [
        ("https://u:p@proxy.corp.example:3128/x", ["u:p", "corp"], "https://"),
        ("gsk_abcd1234efgh5678 r8_abcdefghijkl1234 npm_abcdefghijklmnop", ["gsk_", "r8_", "npm_"], "<secret>"),
        ("AIzaSyA-1234567890abcdefghijklmnopqrstu xai-abcdefghijkl12345678", ["AIza", "xai-"], "<secret>"),
        ("fe80::1ff:fe23:4567:890a 2001:db8:85a3::8a2e:370:7334", ["fe80", "2001"], "<address>"),
        ("2001:0db8:0000:0000:0000:ff00:0042:8329 on eth0", ["2001"], "<address> on eth0"),
        ("ether dead.beef.0001 up", ["dead"], "ether <mac> up"),
        ("Uuid: GPU-0123456789abcdef", ["0123"], "GPU-<serial>"),
        ("root=UUID=ABCD-1234 PARTUUID=12345678-02 ro", ["ABCD", "12345678"], "<uuid> ro"),
        ("cri-containerd-abcdef012345.scope", ["abcdef012345"], "containerd-<id>.scope"),
        ("cannot read /data/Lena/girl.yaml: permission denied", ["Lena", "girl"], "<path>: permission denied"),
        (r"cannot open D:\train\my girl\r.yaml", ["girl", "train"], "cannot open <path>"),
        ("D:/train/girl/r.yaml, and more", ["girl"], "<path>, and more"),
        (r"\\?\UNC\nas2\pics", ["nas2"], "<host>"),
        ("page fault, process MyGame.exe pid 41 thread MyGame:cs0 pid 42", ["MyGame"], "process <program> pid 41"),
    ],
)
def test_what_a_real_machine_could_hold(text: str, gone: list[str], stays: str) -> None:
    cleaned = Private().text(text)
    assert stays in cleaned and not [word for word in gone if word in cleaned]


@pytest.mark.parametrize(
    "text",
    [
        "amdgpu 0000:03:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:40 vmid:8 pasid:32774)",
        "/sys/class/kfd/kfd/topology/nodes/1/properties: gfx_target_version: no number",
        "/opt/rocm-6.4.0/lib:/usr/lib/x86_64-linux-gnu",
        r"C:\Windows\System32\amdhip64_7.dll and C:\Program Files\AMD\ROCm\6.4\bin",
        "at::native::add, c10::Half, torch 2.13.0+rocm7.2, driver 32.0.31019.2002",
        "process python pid 41 thread python:cs0 pid 42",
        "garbage_collection_threshold:0.8,max_split_size_mb:128 and/or n/a",
    ],
)
def test_what_helps_and_is_public_stays(text: str) -> None:
    assert Private().text(text) == text


def test_a_name_with_dots_is_removed_in_every_form() -> None:
    private = private_of({"USER": "erika.muster", "HOME": "/home/erika.muster"}, "box", [])
    assert private.text("erika.muster erikamuster Erika Muster") == "<user> <user> <user> <user>"


def test_a_report_names_remembered_changes_without_the_user_s_paths() -> None:
    size = Workload("0123456789abcdef", "/home/zoe/models/base.safetensors, 1024 px")
    situation, _ = remembering(
        Kept("sdma-off", "hang", "2026-11-20"), Kept("checkpointing", "out-of-memory", "2026-11-21", size)
    )
    text = " ".join(report_file.report(without_private(situation), live=False).split())
    assert "[note] remembered" in text and "change-sdma-off" in text and "checkpointing" in text
    assert "zoe" not in text and "<home>/models/base.safetensors" in text


def test_only_an_earlier_report_is_written_over(tmp_path: Path) -> None:
    recipe, report = tmp_path / "my.yaml", tmp_path / "report.md"
    recipe.write_text("model: {}\n", encoding="utf-8")
    with pytest.raises(StorageError) as caught:
        report_file.write_report(recipe, case(LINUX)[0], live=False)
    assert (caught.value.code, caught.value.where) == ("report-exists", str(recipe))
    assert recipe.read_text(encoding="utf-8") == "model: {}\n"
    for _ in range(2):
        report_file.write_report(report, case(LINUX)[0], live=False)

"""Settings of other trainers: their text in messages, and secrets."""

from __future__ import annotations

import pytest

from lora_rocm.importing.setting import MAX_SHOWN_LETTERS, Setting, Value, path_text

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz1234"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("huggingface_token", "anything"),
        ("wandb_api_key", "anything"),
        ("logging.api-key", "anything"),
        ("password", "x"),
        ("notes", f"my token is {TOKEN}"),
        ("notes", "0123456789abcdef0123456789abcdef01234567"),
        ("additional_parameters", "--wandb_api_key=0123456789abcdefghij --flip_aug"),
        ("args", ["--hub_token", "a", TOKEN]),
        ("key", "sk-abcdefghijklmnop"),
        ("notes", "github_pat_11ABCDEFG0AbCdEfGhIjKl"),
        ("notes", "glpat-AbCdEfGhIjKlMnOpQrSt"),
        ("notes", "AKIAIOSFODNN7EXAMPLE"),
        ("notes", "AIzaSyA1234567890abcdefghijklmnopqrstu"),
        ("notes", "xoxb-123456789012-abcdefghijkl"),
        ("notes", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123456"),
        ("notes", "Authorization: Bearer abcdef0123456789abcdef"),
        ("dataset", "https://me:passw0rd@example.org/x"),
        ("notes", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("smtp_passwd", "x"),
        ("pwd", "x"),
        ("secret_access", "x"),
        ("aws_secret_key", "x"),
        ("storage_options.key", "S3cr3tQwErTyUiOp98"),
        ("login", "S3cr3tQwErTyUiOp98"),
        ("wandb_key", "c3VwZXIgc2VjcmV0IGtleSBieXRlcyAwMTIz"),
        ("notes", "kP3x9Zq7Lm2Vt8Rb5Wn1Yc4Hd6+/Jf0Gs="),
        ("notes", "git clone https://S3cr3tQwErTyUiOp98@example.org/a/b"),
        ("dataset", "https://example.org/x?se=1&sig=S3cr3tQwErTyUiOp98"),
    ],
)
def test_a_secret_is_never_shown(key: str, value: Value) -> None:
    setting = Setting(key, value, "a.toml", 3)
    assert setting.is_secret and setting.shown == "***"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("keep_tokens", 3),
        ("max_token_length", 225),
        ("class_tokens", "zwx"),
        ("revision", "0123456789abcdef0123456789abcdef01234567"),
        ("pad_token", "<pad>"),
        ("num_vectors_per_token", 2),
        ("path", "D:/sets/hf_portraits"),
        ("path", "https://example.org:8080/x"),
        ("prompt", "a bearer of good news"),
        ("path", "C:/sk-portraits"),
        ("image_key", "image_column_name"),
        ("caption_key", "text2"),
        ("output_name", "MyLoraCharacterV2Final001"),
        ("model", "Qwen3-VL-8B-Instruct-2507-v2"),
        ("path", "D:/Set01/v2Img3/X4y5Z6"),
        ("path", "ssh://git@example.org/a/b"),
        ("model", "https://example.org/x.safetensors?download=true&version=12"),
        ("model_hash", "kP3x9Zq7Lm2Vt8Rb5Wn1Yc4Hd6"),
    ],
)
def test_other_values_are_shown(key: str, value: Value) -> None:
    assert not Setting(key, value).is_secret and "***" not in Setting(key, value).shown


def test_a_value_is_shown_on_one_short_line() -> None:
    assert Setting("a", True).shown == "true"
    assert Setting("a", "x\ny").shown.count("\n") == 0
    assert len(Setting("a", "x" * 500).shown) == MAX_SHOWN_LETTERS
    assert Setting("huggingface_token", "").shown == ""


def test_places() -> None:
    assert Setting("a", 1, "f.toml", 3).where == "f.toml:3"
    assert Setting("a", 1, "f.toml").where == "f.toml"
    assert Setting("a", 1).where == "" and Setting("a", 1).is_default


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("C:\\sets\\zwx", "C:/sets/zwx"),
        ("\\\\server\\sets", "//server/sets"),
        (".\\sets", "./sets"),
        ("~/sets", "~/sets"),
        ("/a/b\\ c", "/a/b\\ c"),
        (' "D:\\x" ', "D:/x"),
        ("name", "name"),
        ("C:\new\table\b", "C:/new/table/b"),
        ("a\nb", "a\nb"),
    ],
)
def test_paths_have_forward_slashes(written: str, path: str) -> None:
    assert path_text(written) == path

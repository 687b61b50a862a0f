"""What looks like a secret is shown nowhere, whatever stands around it; all else stays as it is."""

from __future__ import annotations

import base64
import io
import json
import string
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from hypothesis import assume, given
from hypothesis import strategies as st

from fleet.events import HostResult, Outcome
from fleet.paths import PROJECT, state_dir
from fleet.redaction import MARK, RedactedStream, redacted, redacted_data
from fleet.runlog import RunLog

_WORD = string.ascii_letters + string.digits
HUB = st.text(_WORD, min_size=34, max_size=34).map("hf_{}".format)
KEY_ID = st.builds(
    "{}{}".format,
    st.sampled_from(["AKIA", "ASIA"]),
    st.text(string.ascii_uppercase + "234567", min_size=16, max_size=16),
)
SECRET_KEY = st.text(_WORD + "+/", min_size=40, max_size=40)
SESSION = st.builds(
    "{}{}".format,
    st.sampled_from(["IQoJb3JpZ2luX2Vj", "FwoGZXIvYXdzE"]),
    st.text(_WORD + "+/", min_size=80, max_size=300),
)
# What may stand before and after: no letter or digit touches the secret, as it would be another one then.
AROUND = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BESIDE = st.sampled_from([" ", "\n", '"', "'", "\t", "(", ", ", ": ", "\\n", "]"])
NAMES = st.sampled_from(
    [
        "aws_secret_access_key",
        "AWS_SECRET_ACCESS_KEY",
        "SecretAccessKey",
        "secretAccessKey",
        "aws_session_token",
        "SessionToken",
        "X-Amz-Security-Token",
        "HF_TOKEN",
    ]
)


def planted(before: str, left: str, text: str, right: str, after: str) -> str:
    return f"{before}{left}{text}{right}{after}"


@given(st.one_of(HUB, KEY_ID, SESSION), AROUND, BESIDE, BESIDE, AROUND)
def test_a_secret_by_its_look(secret: str, before: str, left: str, right: str, after: str) -> None:
    shown = redacted(planted(before, left, secret, right, after))
    assert secret not in shown
    assert MARK in shown
    assert redacted(shown) == shown


@given(NAMES, SECRET_KEY, AROUND, AROUND)
def test_a_secret_by_its_name(name: str, secret: str, before: str, after: str) -> None:
    assume(secret not in before + after)
    as_json = json.dumps({name: secret})
    forms = [
        f"{name}={secret}", f"{name} = {secret}", f"{name}: {secret}", f"{name}: '{secret}'", as_json,
        json.dumps(as_json), json.dumps(json.dumps(as_json)), urllib.parse.urlencode({name: secret}),
    ]  # fmt: skip
    for form in forms:
        shown = redacted(planted(before, " ", form, "\n", after))
        assert secret not in shown, form
        assert urllib.parse.quote_plus(secret) not in shown, form
        assert name in shown


@given(HUB)
def test_a_token_in_other_clothes(token: str) -> None:
    for form in (
        base64.b64encode(token.encode()).decode(),
        f"Authorization: Bearer {token}",
        f"https://user:{token}@example.com/x",
        urllib.parse.quote(token),
        repr(token.encode()),
    ):
        assert form.split(":")[-1].strip() not in redacted(form)
        assert token not in redacted(form)


def test_presigned_urls_of_boto3() -> None:
    session = boto3.Session("AKIA" + "A" * 16, "s" * 40, "IQoJb3JpZ2lu" + "t" * 90, region_name="us-east-1")
    for version in ("s3v4", "s3"):
        url = session.client("s3", config=Config(signature_version=version)).generate_presigned_url(
            "get_object", Params={"Bucket": "b", "Key": "k"}
        )
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)
        secret = [query[name][0] for name in query if "ignature" in name or "oken" in name or "AccessKey" in name]
        assert len(secret) >= 2
        shown = redacted(f"curl '{url}' -o x")
        for value in secret:
            assert value not in shown and urllib.parse.quote(value, safe="") not in shown
        assert shown.startswith("curl 'https://") and "Expires=" in shown and shown.endswith("' -o x")


def test_a_signed_header() -> None:
    header = (
        "Authorization: AWS4-HMAC-SHA256 Credential=AKIAABCDEFGHIJKLMNOP/20261203/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;x-amz-date, Signature=" + "0a" * 32
    )
    shown = redacted(header)
    assert "AKIAABCDEFGHIJKLMNOP" not in shown and "0a0a" not in shown and "SignedHeaders=host" in shown


def test_private_keys() -> None:
    body = "\n".join(["MIIEow" + "A" * 58] * 3)
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----"
    assert redacted(f"a\n{key}\nb") == f"a\n{MARK}\nb"
    # Cut off, and within JSON: what comes after it stays, and it is still JSON.
    assert json.loads(redacted(json.dumps({"a": key[:100], "b": "kept"}))) == {"a": MARK, "b": "kept"}


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="=:"), max_size=200))
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_what_this_program_says_stays() -> None:
    for text in (
        "secrets_fetch_secret_id: vllm/hf-token",
        "token: /run/credentials/vllm.service/hf_token",
        "authorization: no",
        "aws_session_token: null",
        "hf_hub, hf_overrides, AKIA, ASIA",
        "sha256:" + "ab" * 32,
        "vllm_service_arguments: [--api-key-file, /x]",
    ):
        assert redacted(text) == text
    for file in [*PROJECT.glob("docs/*.md"), *PROJECT.glob("roles/*/README.md"), PROJECT / "README.md"]:
        assert redacted(file.read_text()) == file.read_text(), file


@given(st.recursive(HUB | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(HUB, inner)))
def test_data_keeps_its_shape(data: Any) -> None:
    shown = redacted_data(data)
    assert "hf_" not in json.dumps(shown)
    assert type(shown) is type(data)
    if isinstance(data, list):
        assert len(shown) == len(data)


@given(st.lists(st.one_of(HUB, st.text(st.characters(codec="utf-8", exclude_characters="=:\r"))), max_size=8))
def test_a_stream(words: list[str]) -> None:
    raw = io.BytesIO()
    stream = RedactedStream(raw, encoding="utf-8", newline="")
    for word in words:
        assert stream.write(word + "\n") == len(word) + 1
    stream.flush()
    assert raw.getvalue().decode() == "".join(redacted(word) + "\n" for word in words)


def test_the_log_of_a_run() -> None:
    token = "hf_" + "a" * 34
    state_dir().mkdir(parents=True, exist_ok=True)
    with RunLog("converge") as log:
        log(HostResult("h", "r", "t", Outcome.FAILED, 1.0, f"refused: {token}"))
    assert json.loads(log.path.read_text())["message"] == f"refused: {MARK}"


def test_the_command_line(tmp_path: Path) -> None:
    # A word of the command line that an error names comes back redacted, on both streams.
    token = "hf_" + "Z" * 34
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "converge", "-i", f"{tmp_path}/{token}", "--json"],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert token not in done.stdout + done.stderr
    assert MARK in done.stderr and MARK in json.loads(done.stdout)["error"]["where"]

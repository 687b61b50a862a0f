"""What is learned of a model, in a folder and from a hub that is a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ansible.module_utils.model_probe import read_model, shape

NAME = "owner/some-model"
TOKEN = "hf_not_a_real_token"
SLIDING, FULL = "sliding_attention", "full_attention"
# Gemma 4's language model in the two spellings that its configurations have (transformers 5.24, configuration_gemma4).
BOTH = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "num_hidden_layers": 5, "layer_types": [*[SLIDING] * 4, FULL], "model_type": "gemma4_text"}  # fmt: skip
NEWER = {**BOTH, "per_layer_config": {"4": {"head_dim": 512}}}
OLDER = {**BOTH, "global_head_dim": 512, "attention_k_eq_v": False, "num_global_key_value_heads": 4}
# The figures of real configurations, in as few words as they have; each was read the same by its class.
LARGE = {**OLDER, "num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024}
GEMMA2 = {"model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 26,
          "hidden_size": 2304, "sliding_window": 4096}  # fmt: skip
GEMMA3 = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
         "num_hidden_layers": 32}  # fmt: skip
QWEN = {"model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
        "num_hidden_layers": 28, "sliding_window": 32768}  # fmt: skip


class Server(BaseHTTPRequestHandler):
    """A hub with one model. Its API lists files to everyone; a gated model's files want a token that has access."""

    sizes: ClassVar[dict[str, int]] = {}
    files: ClassVar[dict[str, bytes]] = {}
    gated: ClassVar[bool] = False
    elsewhere: ClassVar[str] = ""
    broken: ClassVar[int] = 0
    portal: ClassVar[bytes] = b""
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        """Answers the two paths that a hub's client asks."""
        token = self.headers.get("Authorization", "")
        self.asked.append((self.path, token))
        name = self.path.removeprefix(f"/{NAME}/resolve/main/")
        if self.broken or self.portal:
            self.reply(self.broken or 200, self.portal)
        elif token not in ("", f"Bearer {TOKEN}", "Bearer stranger"):
            self.reply(401, b"")
        elif self.path == f"/api/models/{NAME}?blobs=true":
            listing = [{"rfilename": file, "size": size} for file, size in self.sizes.items()]
            self.reply(200, json.dumps({"id": NAME, "siblings": listing}).encode())
        elif self.gated and token != f"Bearer {TOKEN}":
            self.reply(403 if token else 401, b"")
        elif self.elsewhere and name in self.files:
            self.send_response(307)
            self.send_header("Location", f"{self.elsewhere}/{NAME}/resolve/main/{name}")
            self.end_headers()
        elif name in self.files:
            self.reply(200, self.files[name])
        else:
            self.reply(404, b"")

    def reply(self, code: int, body: bytes) -> None:
        """Sends an answer."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def serve(**settings: Any) -> tuple[str, type[Server], ThreadingHTTPServer]:
    """A hub of its own on a free port."""
    files = {"config.json": json.dumps({"model_type": "gemma4", "text_config": NEWER}).encode(),
             "chat_template.jinja": b"{{ messages }}"}  # fmt: skip
    known = {"sizes": {"config.json": 9, "chat_template.jinja": 9, "model.safetensors": 10_246_621_918},
             "files": files, "asked": []}  # fmt: skip
    handler = type("Hub", (Server,), {**known, **settings})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}", handler, server


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return str(tmp_path / "token")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # A proxy of the machine's own must not stand between.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started: list[ThreadingHTTPServer] = []

    def start(**settings: Any) -> tuple[str, type[Server]]:
        url, handler, server = serve(**settings)
        started.append(server)
        return url, handler

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def ask(url: str, token_file: str = "", given: int = 0, recorded: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a host learns of the model."""
    found: dict[str, Any] = read_model(NAME, url, token_file, given, recorded or {})
    return found


def test_a_hub_tells_size_shape_and_template(hub: Any) -> None:
    url, handler = hub()
    found = ask(url)
    assert (found["largest_bytes"], found["weights_bytes"]) == (10_246_621_918, 10_246_621_918)
    assert (found["model_type"], found["chat_template"], found["silence"]) == ("gemma4", True, {})
    assert found["attention"] == [[256, 8, 1, 512], [512, 8, 1, 0]]
    assert found["source"] == f"told by {url}"
    # The weights themselves are never asked for.
    assert not any("safetensors" in path for path, _ in handler.asked)


def test_of_many_files_the_index_says_which_count(hub: Any) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    sizes = {"model-1.safetensors": 4_000, "model-2.safetensors": 7_000, "consolidated.safetensors": 11_000,
             "model.safetensors.index.json": 1, "pytorch_model.bin": 11_000}  # fmt: skip
    found = ask(hub(sizes=sizes, files={"model.safetensors.index.json": json.dumps(index).encode()})[0])
    assert (found["largest_bytes"], found["weights_bytes"], found["missing"]) == (7_000, 11_000, [])


def test_the_token_reaches_the_hub_and_nothing_else(hub: Any, token_file: str) -> None:
    beyond, beyond_asked = hub()
    url, handler = hub(gated=True, elsewhere=beyond)
    found = ask(url, token_file)
    assert found["model_type"] == "gemma4"
    assert {token for _, token in handler.asked} == {f"Bearer {TOKEN}"}
    # A hub sends files off to other servers, which the token is not for.
    assert {token for _, token in beyond_asked.asked} == {""}
    assert TOKEN not in json.dumps(found)


@pytest.mark.parametrize(("token", "status"), [("", 401), ("nobody", 401), ("stranger", 403)])
def test_a_gated_model_answers_401_or_403(hub: Any, tmp_path: Path, token: str, status: int) -> None:
    (tmp_path / "token").write_text(token)
    found = ask(hub(gated=True)[0], str(tmp_path / "token"))
    assert (found["silence"]["status"], found["silence"]["token"]) == (status, bool(token))
    assert found["chat_template"] is None
    assert token not in found["silence"]["words"] or not token
    # It lists its files to everyone whose token is not refused outright.
    assert found["largest_bytes"] == (0 if token == "nobody" else 10_246_621_918)


def test_a_token_that_no_header_can_hold_is_told_without_its_text(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_part\nhf_rest")
    found = ask(hub()[0], str(tmp_path / "token"))
    assert "the address or the token is malformed" in found["silence"]["words"]
    assert "hf_" not in json.dumps(found)
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    assert ask(hub()[0], str(tmp_path / "token"))["silence"] == {}


def test_only_the_top_folder_counts(hub: Any) -> None:
    sizes = {"original/consolidated.00.pth": 900, "onnx/model.safetensors": 800, "pytorch_model.bin": 70}
    assert ask(hub(sizes=sizes)[0])["weights_bytes"] == 70


def test_without_an_answer_nothing_is_known_unless_it_was_told_or_given_before(hub: Any) -> None:
    url, _ = hub(broken=503)
    unknown = ask(url)
    assert (unknown["largest_bytes"], unknown["source"]) == (0, "")
    assert unknown["silence"]["status"] == 503
    assert ask("http://127.0.0.1:9")["silence"]["status"] == 0
    assert ask("")["silence"] == {}
    assert ask(url, given=5_000)["largest_bytes"] == 5_000
    before = {"name": NAME, "largest_bytes": 7_000, "weights_bytes": 9_000, "attention": [[128, 8, 8]]}
    held = ask(url, recorded=before)
    assert (held["largest_bytes"], held["source"]) == (7_000, "told by the hub at an earlier run")
    assert held["attention"] == [[128, 8, 8, 0]]
    assert ask(url, recorded={**before, "attention": [[128, 8, 8, 512]]})["attention"] == [[128, 8, 8, 512]]
    assert ask(url, recorded={**before, "name": "owner/another"})["largest_bytes"] == 0


def test_a_page_that_is_no_hub_is_told(hub: Any) -> None:
    url, _ = hub(portal=b"<html>welcome</html>")
    assert "no model hub" in ask(url)["silence"]["words"]


def folder(path: Path, **files: bytes) -> dict[str, Any]:
    """What is read of a folder with these files (`__` stands for a dot)."""
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    found: dict[str, Any] = read_model(str(path), "http://127.0.0.1:9", "", 0, {})
    return found


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": b'{"chat_template": "{{ messages }}"}'}, True),
        ({"chat_template__jinja": b"{{ messages }}"}, True),
        ({"chat_template__json": b'{"chat_template": "{{ messages }}"}'}, True),
        ({}, False),
        ({"tokenizer_config__json": b'{"chat_template": null}'}, False),
        ({"tokenizer_config__json": b"{broken"}, False),
        ({"chat_template__jinja": b" \n"}, False),
        ({"chat_template__json": b"{}"}, False),
    ],
)
def test_a_chat_template_is_found_where_it_may_be(tmp_path: Path, files: dict[str, bytes], expected: bool) -> None:
    # CASES B11.
    assert folder(tmp_path, **files)["chat_template"] is expected


def test_a_folder_is_measured_and_no_hub_is_asked(tmp_path: Path) -> None:
    found = folder(tmp_path, pytorch_model__bin=bytes(300), other__bin=bytes(200), training_args__bin=bytes(900))
    assert (found["largest_bytes"], found["weights_bytes"]) == (300, 500)
    found = folder(tmp_path, a__safetensors=bytes(10), b__safetensors=bytes(30))
    assert (found["largest_bytes"], found["weights_bytes"], found["silence"]) == (30, 40, {})
    assert read_model(str(tmp_path), "", "", 77, {})["largest_bytes"] == 30
    assert found["source"] == "measured in the folder"
    assert read_model(str(tmp_path / "none"), "", "", 0, {})["exists"] is False


def test_a_file_that_the_index_names_and_the_folder_lacks_is_missing(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    assert folder(tmp_path, one__safetensors=bytes(5))["missing"] == ["two.safetensors"]


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (NEWER, [[256, 8, 1, 512], [512, 8, 1, 0]]),
        (OLDER, [[256, 8, 1, 512], [512, 8, 1, 0]]),
        ({**LARGE, "attention_k_eq_v": True}, [[256, 32, 16, 1024], [512, 32, 4, 0]]),
        # Where the widths are said layer by layer, the earlier words for them do not count.
        ({**OLDER, "global_head_dim": 1024, "per_layer_config": {"4": {"head_dim": 512}}},
         [[256, 8, 1, 512], [512, 8, 1, 0]]),
        ({"text_config": NEWER, "vision_config": {}}, [[256, 8, 1, 512], [512, 8, 1, 0]]),
        ({"model_type": "gemma4_text", "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 30},
         [[256, 8, 4, 512], [512, 8, 4, 0]]),
        # Gemma 3 4B leaves its heads to its class, and 12B the width: 3840 / 16 would be 240.
        ({"model_type": "gemma3", "text_config": GEMMA3}, [[256, 8, 4, 0], [256, 8, 4, 1024]]),
        ({**GEMMA3, "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8},
         [[256, 16, 8, 0], [256, 16, 8, 1024]]),
        (GEMMA2, [[256, 8, 4, 0], [256, 8, 4, 4096]]),
        (LLAMA, [[128, 32, 8, 0]]),
        ({**LLAMA, "num_key_value_heads": None, "head_dim": None}, [[128, 32, 32, 0]]),
        # Mistral's first and Phi-3 mini have a window in every layer, Mistral's third has none.
        ({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, [[128, 32, 8, 4096]]),
        ({**LLAMA, "model_type": "mistral", "sliding_window": None}, [[128, 32, 8, 0]]),
        ({**LLAMA, "model_type": "phi3", "hidden_size": 3072, "num_key_value_heads": 32, "sliding_window": 2047},
         [[96, 32, 32, 2047]]),
        # Qwen's window counts where it is used, and in the layers after the first so many.
        (QWEN, [[128, 28, 4, 0]]),
        ({**QWEN, "use_sliding_window": False, "max_window_layers": 28}, [[128, 28, 4, 0]]),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 28}, [[128, 28, 4, 0]]),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 20}, [[128, 28, 4, 0], [128, 28, 4, 32768]]),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 0}, [[128, 28, 4, 32768]]),
        ({**LLAMA, "model_type": "gpt_oss", "num_attention_heads": 64, "head_dim": 64, "sliding_window": 128,
          "layer_types": [SLIDING, FULL] * 16}, [[64, 64, 8, 0], [64, 64, 8, 128]]),
        ({"num_attention_heads": 32, "hidden_size": 4096}, [[128, 32, 32, 0]]),
        ({"num_attention_heads": 32, "num_key_value_heads": [4, 8], "hidden_size": 4096}, []),
        ({"num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512}, []),
        ({"hidden_size": 768}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_heads_are_read_in_every_spelling(config: dict[str, Any], attention: list[list[int]]) -> None:
    assert shape(config)["attention"] == attention
    assert shape(config)["vision"] is ("vision_config" in config)


def test_wide_heads_count_though_no_layer_is_told_to_have_them() -> None:
    told = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "sliding_window": 1024}
    wide = {"global_head_dim": 512, "num_global_key_value_heads": 4}
    found = shape({"model_type": "gemma4", "text_config": {**told, **wide}})["attention"]
    assert found == [[256, 32, 16, 1024], [512, 32, 4, 0]]

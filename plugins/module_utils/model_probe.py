"""What a model is: its files' sizes and its shape, measured in a folder or told by a hub. Changes nothing.

A model is a listing of names and sizes and a way to read its small files; where both come from makes no difference
to what is learned from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ansible.module_utils.hub import Hub, HubError, parsed

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What a training run leaves beside the weights, and vLLM leaves out (weight_utils.py, 0.32.0).
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# What `known` holds of a model, apart from where it was learned.
FACTS = ("model_type", "weights_dtype", "vision", "attention", "chat_template", "largest_bytes", "weights_bytes")


def read_model(
    name: str, endpoint: str, token_file: str, given_bytes: int, recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything the plan needs of a model.

    Args:
        name: a folder on the host (an absolute path) or a name on the hub.
        endpoint: address of the hub; empty to ask none.
        token_file: file of the hub's token on this host.
        given_bytes: size of the largest file as the user gave it, 0 for not given.
        recorded: what an earlier run kept of a model, taken where the hub is silent about the same one.

    Returns:
        The facts of `FACTS` (0, empty and None are "not known"; the size of the largest file and of all weights in
        bytes; attention as `[head size, query heads, KV heads]`), and `name`, `local`, `exists`, `config`,
        `missing` (files that the index names and the folder lacks), `source` (who told the size, in words) and
        `silence`: `{status, words, token}` of a hub that did not tell, or nothing.
    """
    known: dict[str, Any] = {
        "name": name, "local": name.startswith("/"), "exists": False, "config": False, "missing": [],
        "model_type": "", "weights_dtype": "", "vision": False, "attention": [], "chat_template": None,
        "largest_bytes": 0, "weights_bytes": 0, "source": "", "silence": {},
    }  # fmt: skip
    if known["local"]:
        folder = Path(name)
        if not folder.is_dir():
            return known
        listing = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        known |= {"exists": True, "source": "measured in the folder"}
        known |= learned(listing, lambda file: (folder / file).read_bytes())
    elif endpoint:
        hub = Hub(endpoint, name, token_file)
        if recorded.get("name") == name:
            known |= {key: recorded[key] for key in FACTS if key in recorded}
            known["source"] = "told by the hub at an earlier run"
        try:
            listing = hub.sizes()
            known |= {**_sizes(listing, set()), "exists": True, "source": f"told by {hub.endpoint}"}
            known |= learned(listing, hub.read)
        except HubError as error:
            known["silence"] = {"status": error.status, "words": str(error), "token": hub.has_token}
    if given_bytes and not (known["local"] and known["largest_bytes"]):
        known |= {"largest_bytes": given_bytes, "source": "given by preflight_checkpoint_bytes"}
    return known


def learned(listing: Mapping[str, int], read: Callable[[str], bytes]) -> dict[str, Any]:
    """What a model's files say.

    Args:
        listing: size of each file in the model's top folder, bytes, by name.
        read: the content of one of them.
    """

    def json_of(name: str) -> dict[str, Any]:
        return parsed(read(name)) if name in listing else {}

    indexed = {file for index in _INDEXES for file in (json_of(index).get("weight_map") or {}).values()}
    return {
        **shape(json_of("config.json")),
        **_sizes(listing, indexed),
        "config": "config.json" in listing,
        "chat_template": any(_has_template(name, read(name)) for name in _TEMPLATES if name in listing),
        "missing": sorted(indexed - set(listing)),
    }


def _sizes(listing: Mapping[str, int], indexed: set[str]) -> dict[str, int]:
    """Of the weight files that vLLM loads: the indexed ones, else safetensors, else the older formats."""
    for patterns in (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",)):
        names = {name for name in listing for pattern in patterns if fnmatch(name, pattern)} - set(_NOT_WEIGHTS)
        sizes = [listing[name] for name in (names & indexed or names)]
        if sizes:
            return {"largest_bytes": max(sizes), "weights_bytes": sum(sizes)}
    return {"largest_bytes": 0, "weights_bytes": 0}


def _has_template(name: str, content: bytes) -> bool:
    return bool(content.strip()) if name.endswith(".jinja") else bool(parsed(content).get("chat_template"))


def shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Model type, type of the weights and attention, from a `config.json`.

    A model with several modalities keeps the language model's part in `text_config`. Gemma 4 says its wide heads
    either as `global_head_dim` and `num_global_key_value_heads` or layer by layer in `per_layer_config`.
    """
    text = config.get("text_config") or config
    heads = _number(text.get("num_attention_heads"))
    kv_heads = _number(text.get("num_key_value_heads", heads))
    head = _number(text.get("head_dim")) or (_number(text.get("hidden_size")) // heads if heads else 0)
    layers = list((text.get("per_layer_config") or {}).values())
    if text.get("global_head_dim"):
        wide = {"head_dim": text["global_head_dim"]}
        if text.get("attention_k_eq_v", True) and text.get("num_global_key_value_heads"):
            wide["num_key_value_heads"] = text["num_global_key_value_heads"]
        layers.append(wide)
    found = {(head, heads, kv_heads)} | {
        (_number(layer.get("head_dim", head)), heads, _number(layer.get("num_key_value_heads", kv_heads)))
        for layer in layers
    }
    # A latent cache (kv_lora_rank) has kernels of its own, which these heads say nothing about.
    known = all(all(entry) for entry in found) and not text.get("kv_lora_rank")
    return {
        "model_type": str(config.get("model_type") or ""),
        "weights_dtype": str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or ""),
        "vision": "vision_config" in config,
        "attention": sorted(list(entry) for entry in found) if known else [],
    }


def _number(value: object) -> int:
    """A whole number, 0 for anything else (some models give one per layer)."""
    return value if isinstance(value, int) else 0

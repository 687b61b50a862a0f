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

# What a config.json may leave out because its class has it (transformers 5.24). Of every so many layers the last has
# no window.
_UNSAID: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma3n_text": {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 5},
    "gemma4_text": {
        "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": False, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
}  # fmt: skip


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
        bytes; attention as `[head size, query heads, KV heads, window]` of each kind of layer), and `name`, `local`,
        `exists`, `config`, `missing` (files that the index names and the folder lacks), `source` (who told the size,
        in words) and `silence`: `{status, words, token}` of a hub that did not tell, or nothing.
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
            # Records of before the windows were read hold three numbers. What heads there are decides what fits, so
            # that is kept, with no window, until the hub tells it again.
            known["attention"] = [[*entry, 0][:4] for entry in known["attention"]]
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

    A model with several modalities keeps the language model's part in `text_config`.
    """
    text = config.get("text_config") or config
    kind = str(text.get("model_type") or config.get("model_type") or "")
    return {
        "model_type": str(config.get("model_type") or ""),
        "weights_dtype": str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or ""),
        "vision": "vision_config" in config,
        "attention": _attention({**_UNSAID.get(kind, {}), **text}, kind),
    }


def _attention(text: Mapping[str, Any], kind: str) -> list[list[int]]:
    """The kinds of layers, each `[head size, query heads, KV heads, window]`; nothing where one cannot be told.

    Gemma 4 says its wide heads layer by layer in `per_layer_config`, or for all full layers as `global_head_dim` and
    `num_global_key_value_heads`, the latter only where keys are values (transformers 5.24, configuration_gemma4).
    """
    types, unplaced = _layer_types(text), set()
    changes = {int(index): change for index, change in (text.get("per_layer_config") or {}).items()}
    if "per_layer_config" not in text and text.get("global_head_dim"):
        wide = {"head_dim": text["global_head_dim"]}
        if text.get("attention_k_eq_v", True) and text.get("num_global_key_value_heads"):
            wide["num_key_value_heads"] = text["num_global_key_value_heads"]
        changes = {index: wide for index, layer in enumerate(types) if layer != "sliding_attention"}
        # A file that does not say which layers are the full ones has them all the same.
        unplaced = {_entry({**text, **wide}, kind, "full_attention")} if not changes else set()
    found = {
        _entry({**text, **changes.get(index, {})}, kind, types[index] if index < len(types) else "")
        for index in range(max(1, _number(text.get("num_hidden_layers"))))
    } | unplaced
    # A latent cache (kv_lora_rank) has kernels of its own, which these heads say nothing about.
    known = all(all(entry[:3]) for entry in found) and not text.get("kv_lora_rank")
    return sorted(list(entry) for entry in found) if known else []


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """`sliding_attention` or another word for each layer; nothing where all layers are alike."""
    if text.get("layer_types"):
        return [str(layer) for layer in text["layer_types"]]
    count, pattern = _number(text.get("num_hidden_layers")), _number(text.get("sliding_window_pattern"))
    if text.get("use_sliding_window") and "max_window_layers" in text:
        full = _number(text["max_window_layers"])
        return ["full_attention" if index < full else "sliding_attention" for index in range(count)]
    if not pattern:
        return []
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]


def _entry(layer: Mapping[str, Any], kind: str, layer_type: str) -> tuple[int, int, int, int]:
    """One layer's kind. Without layer types a window is that of every layer (engine/arg_utils.py, 0.27.0 to 0.33.0)."""
    heads = _number(layer.get("num_attention_heads"))
    told = layer.get("num_key_value_heads")
    kv_heads = heads if told is None else _number(told)
    head = _number(layer.get("head_dim")) or (_number(layer.get("hidden_size")) // heads if heads else 0)
    # Qwen's have a window in their file and do not use it unless they say so.
    used = layer.get("use_sliding_window", not kind.startswith("qwen"))
    window = _number(layer.get("sliding_window")) if used and layer_type in ("", "sliding_attention") else 0
    return head, heads, kv_heads, window


def _number(value: object) -> int:
    """A whole number, 0 for anything else (some models give one per layer)."""
    return value if isinstance(value, int) else 0

"""Write a training state as a Hugging Face `GlmMoeDsaForCausalLM` folder, weights in bf16.

    python training/export.py --state training/build/state --out kvpolicy/models/tiny_dsa

With transformers installed, `--check FILE` compares its logits with the training forward's.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

import layers
import torch
from model import Forward, Params, Pass, TinyConfig, shapes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = {
    "q_a": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "o": "o_proj",
}  # fmt: skip
BLOCK = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
BLOCK |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
INDEX = {
    "idx_q": "wq_b.weight", "idx_k": "wk.weight", "idx_gain": "k_norm.weight",
    "idx_bias": "k_norm.bias", "idx_w": "weights_proj.weight",
}  # fmt: skip
TOP = {
    "embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"
}  # fmt: skip


def hf_names(cfg: TinyConfig) -> dict[str, tuple[str, int | None]]:
    """Checkpoint name -> (stacked parameter, index in the stack)."""
    names: dict[str, tuple[str, int | None]] = {hf: (own, None) for own, hf in TOP.items()}
    for layer in range(cfg.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        names |= {f"{prefix}.self_attn.{hf}.weight": (own, layer) for own, hf in ATTENTION.items()}
        names |= {f"{prefix}.{hf}.weight": (own, layer) for own, hf in BLOCK.items()}
    for number, layer in enumerate(cfg.full_layers):
        prefix = f"model.layers.{layer}.self_attn.indexer"
        names |= {f"{prefix}.{hf}": (own, number) for own, hf in INDEX.items()}
    return names


def hf_config(cfg: TinyConfig) -> dict[str, object]:
    """config.json: no MoE layer exists, so the expert fields are small placeholders."""
    count = cfg.num_hidden_layers
    kinds = ["full" if i in cfg.full_layers else "shared" for i in range(count)]
    own = asdict(cfg)
    del own["full_layers"], own["rope_theta"]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **own,
        "num_key_value_heads": cfg.num_attention_heads, "head_dim": cfg.qk_rope_head_dim,
        "qk_head_dim": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, "indexer_types": kinds,
        "index_topk_freq": 4, "index_skip_topk_offset": 3, "mlp_layer_types": ["dense"] * count,
        "layer_types": ["indexed_attention"] * count, "first_k_dense_replace": count,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "rms_norm_eps": layers.EPS, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": False,
        "initializer_range": 0.02, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "output_router_logits": False, "use_cache": True,
        "dtype": "bfloat16",
    }  # fmt: skip


def load_params(state: Path) -> Params:
    """Stacked fp32 parameters from the files of a training state."""
    params: Params = {}
    for file in sorted(state.glob("params-*.safetensors")):
        params |= load_file(file)
    return params


def from_checkpoint(folder: Path, cfg: TinyConfig) -> Params:
    """Stacked fp32 parameters from an exported folder."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    parts: dict[str, list[Tensor]] = {}
    for name, (own, _) in hf_names(cfg).items():
        parts.setdefault(own, []).append(tensors[name])
    return {own: torch.stack(parts[own]) if own not in TOP else parts[own][0] for own in parts}


def export(params: Params, cfg: TinyConfig, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    assert {n: tuple(p.shape) for n, p in params.items()} == shapes(cfg)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (params[own] if at is None else params[own][at]).to(torch.bfloat16).contiguous().cpu()
        for name, (own, at) in hf_names(cfg).items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(hf_config(cfg), indent=2) + "\n")
    generation = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def compare_with_transformers(
    out: Path, ids: Tensor, selected: list[Tensor], cfg: TinyConfig
) -> tuple[Tensor, Tensor, int]:
    """Logits [T, V] of transformers with its own and with our selections, and rows that differ.

    A row differs where two scores at the boundary lie within fp32 rounding of each other.
    """
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    theirs: list[Tensor] = []
    indexers = [model.model.layers[i].self_attn.indexer for i in cfg.full_layers]
    hooks = [m.register_forward_hook(lambda _m, _a, o: theirs.append(o[0])) for m in indexers]
    free = model(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    first = cfg.index_topk
    differ = sum(
        int((a.sort(-1).values[first:] != b[first:]).any(-1).sum())
        for a, b in zip(theirs, selected, strict=True)
    )
    position = torch.arange(len(ids), dtype=torch.int32)[:, None]
    for module, idx in zip(indexers, selected, strict=True):
        own = torch.where(idx < 0, position, idx)[None]
        module.forward = lambda *_args, _own=own, **_kwargs: _own
    return free, model(ids[None], use_cache=False).logits[0], differ


@torch.no_grad()
def check(out: Path, cfg: TinyConfig, text: bytes, length: int) -> dict[str, float]:
    """Differences to transformers over `length` tokens, all in fp32 on the CPU."""
    ids = torch.tensor([256, *text[: length - 1]])
    params = from_checkpoint(out, cfg)
    run = Pass(seq_len=len(ids), dense=False, triton=False, dtype=torch.float32)
    result = Forward(params, cfg, run, None)(ids)
    ours = layers.head_logits(result.hidden, params["norm"], params["head"])
    free, same, differ = compare_with_transformers(out, ids, result.selected, cfg)
    nll = [torch.nn.functional.cross_entropy(x[:-1], ids[1:]).item() for x in (ours, free)]
    return {
        "max_logit_difference_same_selection": (ours - same).abs().max().item(),
        "max_logit_difference": (ours - free).abs().max().item(),
        "rows_with_other_selection": differ,
        "rows": (len(ids) - cfg.index_topk) * len(cfg.full_layers),
        "bpb_ours": nll[0] / math.log(2),
        "bpb_transformers": nll[1] / math.log(2),
    }


def main() -> None:
    """Export a state and optionally compare with transformers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--state", type=Path, help="export this state first")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", type=Path, help="text file for the comparison")
    parser.add_argument("--length", type=int, default=2048, help="tokens compared")
    args = parser.parse_args()
    cfg = TinyConfig()
    if args.state is not None:
        export(load_params(args.state), cfg, args.out)
    if args.check is not None:
        print(json.dumps(check(args.out, cfg, args.check.read_bytes(), args.length), indent=1))


if __name__ == "__main__":
    main()

"""The mixture-of-experts part of a config.json: how many experts, and how they are chosen."""

from __future__ import annotations

from typing import Any, Literal, cast

from radix_mla.errors import CheckpointError, UnsupportedModel
from radix_mla.models.config_reader import ConfigReader

TopkMethod = Literal["greedy", "group_limited_greedy", "noaux_tc"]
ScoringFunc = Literal["softmax", "sigmoid"]


def read_moe(reader: ConfigReader, *, is_v2: bool, dense: bool) -> dict[str, Any]:
    """The MoE fields. Where both architectures' defaults differ, the key must be there."""
    num_experts = 0 if dense else reader.count("n_routed_experts", 0)
    if num_experts == 0:
        return {
            "n_routed_experts": 0,
            "n_shared_experts": 0,
            "num_experts_per_tok": 0,
            "moe_intermediate_size": 0,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        }
    method = reader.text("topk_method", "greedy" if is_v2 else "noaux_tc")
    scoring = reader.text("scoring_func", "softmax" if is_v2 else "sigmoid")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise UnsupportedModel(f"topk_method {method!r} is not supported")
    if scoring not in ("softmax", "sigmoid"):
        raise UnsupportedModel(f"scoring_func {scoring!r} is not supported")
    n_group = reader.count("n_group", 1) or 1
    topk_group = reader.count("topk_group", 1) or 1
    top_k = reader.size("num_experts_per_tok")
    _check_groups(num_experts, n_group, topk_group, top_k, grouped=method != "greedy")
    return {
        "n_routed_experts": num_experts,
        "n_shared_experts": reader.count("n_shared_experts", 0),
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": reader.size("moe_intermediate_size"),
        "first_k_dense_replace": _first_dense(reader),
        "moe_layer_freq": reader.count("moe_layer_freq", 1) or 1,
        "n_group": n_group,
        "topk_group": topk_group,
        "topk_method": cast(TopkMethod, method),
        "scoring_func": cast(ScoringFunc, scoring),
        "norm_topk_prob": reader.flag("norm_topk_prob", False if is_v2 else None),
        "routed_scaling_factor": reader.number("routed_scaling_factor"),
    }


def _first_dense(reader: ConfigReader) -> int:
    """How many layers come before the first MoE layer: one number, or transformers' list."""
    types = reader.get("mlp_layer_types")
    if types is None:
        return reader.count("first_k_dense_replace")
    types = [str(kind) for kind in types] if isinstance(types, list) else [str(types)]
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise UnsupportedModel("mlp_layer_types must be dense layers followed by sparse ones")
    return dense


def _check_groups(
    num_experts: int, n_group: int, topk_group: int, top_k: int, *, grouped: bool
) -> None:
    if grouped and num_experts % n_group:
        raise CheckpointError(
            f"config.json: n_routed_experts {num_experts} is no multiple of n_group {n_group}"
        )
    if grouped and topk_group > n_group:
        raise CheckpointError(f"config.json: topk_group {topk_group} is above n_group {n_group}")
    choice = num_experts // n_group * topk_group if grouped else num_experts
    if top_k > choice:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {top_k} is above the {choice} experts to choose from"
        )

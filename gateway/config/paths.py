"""Paths that clients know, and paths that manage an engine. Configured routes are checked against both.

`gateway/request/routes.py` has the kind of each path.
"""

from __future__ import annotations

from typing import Final

KNOWN_PATHS: Final = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/responses": "POST",
    "/v1/responses/*/cancel": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/audio/transcriptions": "POST",
    "/v1/audio/translations": "POST",
    "/v1/embeddings": "POST",
    "/v1/rerank": "POST",
    "/v2/rerank": "POST",
    "/rerank": "POST",
    "/v1/score": "POST",
    "/score": "POST",
    "/pooling": "POST",
    "/classify": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/files": "GET POST",
    "/v1/files/*": "GET DELETE",
    "/v1/files/*/content": "GET",
    "/v1/batches": "GET POST",
    "/v1/batches/*": "GET",
    "/v1/batches/*/cancel": "POST",
    "/v1/models": "GET",
    "/fairgate/me": "GET",
    "/fairgate/me/page": "GET",
    "/fairgate/me/page/*": "GET",
    "/v1/responses/*": "GET DELETE",
    "/v1/responses/*/input_items": "GET",
    "/": "GET",
    "/health": "GET",
    "/ping": "GET",
    "/version": "GET",
}
"""Methods by path, in which a star stands for one step. HEAD comes with GET."""

MANAGEMENT: Final = frozenset(
    {
        "abort_request", "abort_requests", "attach_backend_load", "begin_weight_update",
        "clear_hicache_storage_backend", "close_session", "collective_rpc", "configure_logging",
        "continue_generation", "destroy_weights_update_group", "dump_expert_distribution_record", "flush_cache",
        "freeze_gc", "get_weights_by_name", "init_weight_transfer_engine", "init_weights_update_group", "is_paused",
        "is_scaling_elastic_ep", "is_sleeping", "load_lora_adapter", "load_lora_adapter_from_tensors", "open_session",
        "pause", "pause_generation", "release_memory_occupation", "reset_encoder_cache", "reset_mm_cache",
        "reset_prefix_cache", "resume", "resume_memory_occupation", "scale_elastic_ep", "server_info",
        "set_internal_state", "sleep", "slow_down", "start_profile", "stop_profile", "unload_lora_adapter",
        "update_weight_version", "update_weights", "update_weights_from_disk", "update_weights_from_distributed",
        "update_weights_from_tensor", "wake_up",
    }
)  # fmt: skip
"""Steps of paths that manage an engine. No list has them, and no star in the config matches them."""

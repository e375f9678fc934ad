"""Prefix-cache hits that end before the first wanted row. It touches these internals of vLLM:

* `KVCacheManager.get_computed_blocks(request)`, which the scheduler asks for a request's hit;
* `KVCacheCoordinator.find_longest_cache_hit(block_hashes, max_cache_hit_length)` within it.

Without this, a context that ends with a block hides the row of its last token, and the whole
sequence would have to be computed again.
"""

from typing import Any

from logsteer_server.engines.vllm.extra_args import SCORE


class HitLimit:
    """Stands before a cache manager's two functions, from when it is made."""

    def __init__(self, manager: Any) -> None:
        self._get, self._find = (
            manager.get_computed_blocks,
            manager.coordinator.find_longest_cache_hit,
        )
        self._limit: int | None = None
        manager.get_computed_blocks = self.get_computed_blocks
        manager.coordinator.find_longest_cache_hit = self.find_longest_cache_hit

    def get_computed_blocks(self, request: Any) -> Any:
        """vLLM's answer for a request, its rows kept out of the hit."""
        params = request.sampling_params
        wanted = (params.extra_args or {}).get(SCORE) if params else None
        self._limit = None if wanted is None else wanted["first_row"]
        try:
            return self._get(request)
        finally:
            self._limit = None

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """vLLM's answer, of at most as many tokens as stand before the first wanted row."""
        limit = max_cache_hit_length if self._limit is None else self._limit
        return self._find(block_hashes, min(max_cache_hit_length, limit))
